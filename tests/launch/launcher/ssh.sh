#!/bin/sh
# ssh -o OPTION -o OPTION HOST COMMAND, where each host is this machine
shift 4
echo $$ > "$(dirname "$0")/$1.pid"
exec sh -c "$2"
