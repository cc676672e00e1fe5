#!/bin/sh
# horovodrun with one rank on each container of the service "worker"; what follows it on the command line is passed on.
set -eu
hosts=$(getent ahostsv4 worker | awk '$2 == "STREAM" { print $1 ":1" }' | sort -u)
echo "workers: $hosts" | tr '\n' ' '; echo
exec horovodrun -np "$(echo "$hosts" | wc -l)" -H "$(echo "$hosts" | paste -sd ,)" \
    --binding-args="--bind-to none --map-by slot" "$@"
