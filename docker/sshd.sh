#!/bin/sh
# A worker: sshd without root, on port 2222, for whom ~/.ssh/authorized_keys lets in; the key pair is mounted there.
set -eu
key=$(mktemp -d)/host
ssh-keygen -q -t ed25519 -N '' -f "$key"
exec /usr/sbin/sshd -D -e -p 2222 -h "$key" -o UsePAM=no -o PidFile=none -o StrictModes=no -o "SetEnv=PATH=$PATH"
