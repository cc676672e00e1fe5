"""Wrappers around methods (error feedback, momentum, schedules, measurement) and routers."""
