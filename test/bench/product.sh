#!/usr/bin/env bash
# The product beside the bare hop and direct, in one interleaved run, on loopback:
# `make bench`. `iop up` is compared with nats-min-embedded, and broker, Edge and Node
# as processes of their own (iop-hosts) with nats-min. ROUNDS, MODES and STREAMS as in
# run.sh. It stops what it started.
set -euo pipefail
cd "$(dirname "$0")"
IOP=${IOP:-../../bin/iop}
OUT=${OUT:-out/product}
ROUNDS=${ROUNDS:-5}
MODES=${MODES:-"json stream cancel bulk idle"}
STREAMS=${STREAMS:-2000}
mkdir -p bin "$OUT"
rm -f "$OUT"/*.jsonl
[ -n "${NOBUILD:-}" ] || go build -o bin/ ./cmd/...
PIDS=()
DATA=$(mktemp -d)
stop() { for p in "${PIDS[@]}"; do kill "$p" 2>/dev/null || true; done; rm -rf "$DATA"; }
trap stop EXIT
up() { "$@" >>"$OUT/procs.log" 2>&1 & PIDS+=($!); LAST=$!; }
C=$OUT/certs
up bin/mockprovider; MOCK=$LAST
up bin/natshop -role edge+broker -addr 127.0.0.1:18005 -broker 127.0.0.1:18223 -certs "$C"; E=$LAST
until [ -f "$C/client.key" ]; do sleep 0.1; done; sleep 0.5
up bin/natshop -role node -broker 127.0.0.1:18223 -certs "$C"; N=$LAST
up bin/natshop -role broker -certs "$C"; B2=$LAST
sleep 0.7
up bin/natshop -role edge -certs "$C"; E2=$LAST
up bin/natshop -role node -certs "$C"; N2=$LAST
cat >"$DATA/iop.yaml" <<Y
log: {level: warn}
broker: {}
edge:
  name: local
  models: auto
  nodes:
    - name: here
      adapters:
        - {name: mock, type: openai_compat, base_url: "http://127.0.0.1:18000", capacity: 20000}
node: {name: here, edge: local}
Y
"$IOP" up --data-dir "$DATA/d" --config "$DATA/iop.yaml" --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --broker-listen 127.0.0.1:0 --json >"$DATA/up.json" 2>>"$OUT/procs.log" & PIDS+=($!); I=$!
until [ -s "$DATA/up.json" ]; do sleep 0.1; kill -0 $I; done
H=$DATA/hosts
"$IOP" init --out "$H" --edge local --broker 127.0.0.1:18333 --node n1 >/dev/null
sed -i 's/0.0.0.0:8400/127.0.0.1:18334/; s/127.0.0.1:8401/127.0.0.1:18335/; /{name: /d' "$H/edge/edge.yaml"
sed -i '/adapters:/a\        - {name: mock, type: openai_compat, base_url: "http://127.0.0.1:18000", capacity: 20000}' "$H/edge/edge.yaml"
up "$IOP" broker --log-level warn --config "$H/broker-1/broker-1.yaml"; HB=$LAST
up "$IOP" edge --log-level warn --config "$H/edge/edge.yaml"; HE=$LAST
up "$IOP" node --log-level warn --config "$H/node-n1/node-n1.yaml"; HN=$LAST
HKEY=$(cat "$H/edge/api-key")
until curl -sf -H "Authorization: Bearer $HKEY" http://127.0.0.1:18334/v1/models | grep -q '"m"'; do sleep 0.2; kill -0 $HE $HB $HN; done
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" "$DATA/up.json"; }
URL=$(field base_url); KEY=$(field api_key)
T=(-t "direct|http://127.0.0.1:18000|$MOCK" -t "nats-min-embedded|http://127.0.0.1:18005|$E,$N" -t "iop|${URL%/v1}|$I|m|$KEY"
  -t "nats-min|http://127.0.0.1:18004|$B2,$E2,$N2" -t "iop-hosts|http://127.0.0.1:18334|$HB,$HE,$HN|m|$HKEY")
sleep 1
L=bin/load
for m in $MODES; do
  case $m in
  json)
    $L -mode small-json -c 1 -d 1500ms -rounds "$ROUNDS" "${T[@]}" >"$OUT/json-c1.jsonl"
    $L -mode small-json -c 16 -d 1500ms -rounds "$ROUNDS" "${T[@]}" >"$OUT/json-c16.jsonl" ;;
  stream)
    $L -mode stream -c 32 -delay-us 20000 -chunks 50 -d 2500ms -rounds "$ROUNDS" "${T[@]}" >"$OUT/stream-paced.jsonl"
    $L -mode stream -c 8 -chunks 200 -d 2s -rounds "$ROUNDS" "${T[@]}" >"$OUT/stream-max.jsonl" ;;
  bulk)
    $L -mode download -c 2 -mib 32 -d 2s -rounds "$ROUNDS" "${T[@]}" >"$OUT/download.jsonl"
    $L -mode upload -c 2 -mib 32 -d 2s -rounds "$ROUNDS" "${T[@]}" >"$OUT/upload.jsonl" ;;
  idle) $L -mode idle -c "$STREAMS" -delay-us 10000000 -d 4s -rounds 1 "${T[@]}" >"$OUT/idle.jsonl" ;;
  edge) # The Edge's own share of an idle stream beside a plain net/http server's (the
    # provider's): a run of its own, MODES=edge, as memory once grown is not given back.
    $L -mode idle -c "$STREAMS" -delay-us 10000000 -d 4s -rounds 1 -t "direct|http://127.0.0.1:18000|$MOCK" -t "iop-edge|http://127.0.0.1:18334|$HE|m|$HKEY" >"$OUT/idle-edge.jsonl" ;;
  cancel) $L -mode cancel -n 30 -rounds 3 "${T[@]}" >"$OUT/cancel.jsonl" ;;
  esac
  echo "$m done: load $(cut -d' ' -f1-3 /proc/loadavg)"
done
bin/table "$OUT"/*.jsonl
bin/ratios "$OUT"/*.jsonl
bin/ratios -hop nats-min -of iop-hosts "$OUT"/*.jsonl
