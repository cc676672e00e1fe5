"""Wrappers around methods - error feedback, momentum, schedules, measuring - and the router."""
