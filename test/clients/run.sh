#!/usr/bin/env bash
# The public Go SDKs through the product, in front of imitations of Ollama, llama.cpp's
# server and vLLM: `make clients`. It needs Go and the module proxy, listens on loopback
# only, stops what it started, and prints "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")"
BIN=$(cd ../.. && pwd)/bin
go build -o "$BIN/imitation" ./imitation
(cd goclients && go build -o "$BIN/goclients" .)
(cd langchain && go build -o "$BIN/langchain" .)

WORK=$(mktemp -d)
stop() {
  kill ${IOP_PID:-} ${IMITATION_PID:-} 2>/dev/null || true
  wait
  rm -rf "$WORK"
}
trap stop EXIT
pause() { read -rt 0.1 <> <(:) || :; }

"$BIN/imitation" >"$WORK/imitation" & IMITATION_PID=$!
until grep -q READY "$WORK/imitation"; do pause; kill -0 $IMITATION_PID; done
address() { sed -n "s/^$1=//p" "$WORK/imitation"; }

# A group for every model of every server, under a name of its own: callers name
# ollama/tiny, the server is asked for its tiny:latest.
MODELS="tiny slow cut busy busy-once broken nope"
groups() {
  for s in ollama llama vllm; do for m in $MODELS; do
    echo "    - {name: $s/$m, providers: [{provider: here/$s/$m}]}"
  done; done
}
adapter() { echo "        - {name: $1, type: openai_compat, profile: $2, base_url: \"$3\", capacity: 4}"; }
providers() {
  for s in ollama llama vllm; do for m in $MODELS; do
    t=$m; [ "$s/$m" = ollama/tiny ] && t=tiny:latest
    echo "        - {id: $s/$m, adapter: $s, target: \"$t\"}"
  done; done
}
cat >"$WORK/iop.yaml" <<Y
log: {level: warn}
broker: {}
edge:
  name: local
  models:
$(groups)
  nodes:
    - name: here
      adapters:
$(adapter ollama ollama "$(address OLLAMA)")
$(adapter llama llamacpp "$(address LLAMA)")
$(adapter vllm vllm "$(address VLLM)")
      providers:
$(providers)
node: {name: here, edge: local}
Y
"$BIN/iop" up --data-dir "$WORK/iop" --config "$WORK/iop.yaml" --json --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --broker-listen 127.0.0.1:0 \
  >"$WORK/up.json" 2>"$WORK/log" & IOP_PID=$!
until [ -s "$WORK/up.json" ]; do pause; kill -0 $IOP_PID || { cat "$WORK/log"; exit 1; }; done
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" "$WORK/up.json"; }
BASE=$(field base_url); BASE=${BASE%/v1}; KEY=$(field api_key)

# Ollama has no count_tokens; llama.cpp's server takes every model's name for its own,
# so there the Edge's own 404 is what a caller meets.
for s in ollama llama vllm; do
  skip=; [ $s = ollama ] && skip=anthropic/count_tokens
  missing=$s/nope; [ $s = llama ] && missing=nope
  echo "--- langchaingo, $s"
  "$BIN/langchain" -base "$BASE" -key "$KEY" -model $s/tiny -slow $s/slow >"$WORK/out" 2>&1 || :
  cat "$WORK/out"; cat "$WORK/out" >>"$WORK/all"
  echo "--- openai-go, anthropic-sdk-go, go-openai, $s"
  "$BIN/goclients" -base "$BASE" -key "$KEY" -model $s/tiny -slow $s/slow -missing $missing -busy $s/busy -busy-once $s/busy-once \
    -broken $s/broken -cut $s/cut -open "$(address CONTROL)" -auth -skip "$skip" >"$WORK/out" 2>&1 || :
  cat "$WORK/out"; cat "$WORK/out" >>"$WORK/all"
done
kill $IMITATION_PID; wait $IMITATION_PID || :; IMITATION_PID=
tail -n 1 "$WORK/imitation"

count() { grep -c "^$1" "$WORK/all" || :; }
for sdk in openai anthropic gopenai langchain-openai; do
  echo "$sdk: $(count "PASS $sdk/") passed, $(count "FAIL $sdk") failed, $(count "SKIP $sdk/") skipped"
done
passed=$(count PASS) failed=$(count FAIL) skipped=$(count SKIP)
# A program that died in its middle printed no count of its own.
[ "$(count '[0-9]* passed, ')" = 6 ] || { echo "FAIL a program did not come to its end"; failed=$((failed + 1)); }
[ $failed = 0 ] || { echo "--- iop"; cat "$WORK/log"; }
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
