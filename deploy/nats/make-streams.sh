#!/bin/sh
# Creates the router's streams with three replicas, if they do not exist. The routers create missing ones themselves,
# but with one replica; they do not change the number of an existing stream. Needs the nats command and NATS_URL.
set -eu

make() {
  name=$1
  shift
  # A cluster that has just started has no leader yet, and refuses.
  until nats stream info "$name" >/dev/null 2>&1 || nats stream add "$name" --storage=file --replicas=3 --defaults "$@"; do
    echo "waiting for JetStream" >&2
    sleep 1
  done
}

make SPILLWAY_ROUTER --subjects=beamline.router.v1.decide --retention=work --dupe-window=2m
make SPILLWAY_ROUTER_DLQ --subjects=beamline.router.v1.decide.dlq --retention=limits --dupe-window=1h
