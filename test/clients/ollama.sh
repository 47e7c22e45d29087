#!/usr/bin/env bash
# A real Ollama with the tiny scripted model behind the product, and the public Go
# SDKs as callers: `make ollama`. The first run builds Ollama (minutes of CPU) into bin/;
# it needs Debian's nlohmann-json3-dev and libstb-dev. Everything listens on
# loopback; the script stops what it started, and prints "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")"
ROOT=$(cd ../.. && pwd)
BIN=$ROOT/bin
PORT=${PORT:-21434}
OLLAMA_VERSION=0.17.4
mkdir -p "$BIN"
if [ ! -x "$BIN/ollama" ]; then
  [ -f /usr/include/nlohmann/json.hpp ] && [ -d /usr/include/stb ] || {
    apt-get update -qq && apt-get install -y -qq --no-install-recommends nlohmann-json3-dev libstb-dev >/dev/null; }
  # The variable that is no part of Go's cache key: the build is cached as a whole.
  CPLUS_INCLUDE_PATH=$PWD/ollama-model/include GOBIN=$BIN GOFLAGS= \
    go install -ldflags "-s -w -X=github.com/ollama/ollama/version.Version=$OLLAMA_VERSION" "github.com/ollama/ollama@v$OLLAMA_VERSION"
fi
(cd tinygguf && go build -o "$BIN/tinygguf" .)
(cd goclients && go build -o "$BIN/goclients" .)
(cd langchain && go build -o "$BIN/langchain" .)
WORK=$(mktemp -d)
stop() {
  [ -n "${IOP_PID:-}" ] && kill "$IOP_PID" 2>/dev/null || true
  [ -n "${OLLAMA_PID:-}" ] && kill -TERM -- "-$OLLAMA_PID" 2>/dev/null || true
  rm -rf "$WORK"
}
trap stop EXIT
export OLLAMA_HOST=127.0.0.1:$PORT OLLAMA_MODELS=$WORK/models HOME=$WORK OLLAMA_NUM_PARALLEL=4
setsid "$BIN/ollama" serve >"$WORK/ollama.log" 2>&1 & OLLAMA_PID=$!
until curl -sf "http://$OLLAMA_HOST/api/version" >/dev/null; do sleep 0.1; kill -0 $OLLAMA_PID; done
cp ollama-model/Modelfile.* "$WORK/"
"$BIN/tinygguf" -o "$WORK/tiny.gguf"
for m in tiny tiny-think:think tiny-json:json tiny-long:long tiny-utf8:utf8; do
  (cd "$WORK" && "$BIN/ollama" create "${m%%:*}" -f "Modelfile.${m##*:}" >/dev/null 2>&1)
done
cat >"$WORK/iop.yaml" <<Y
log: {level: warn}
broker: {}
edge:
  name: local
  models: auto
  nodes:
    - name: here
      adapters:
        - {name: ollama, type: openai_compat, base_url: "http://$OLLAMA_HOST", capacity: 4}
node:
  name: here
  edge: local
Y
"$BIN/iop" up --data-dir "$WORK/iop" --config "$WORK/iop.yaml" --json --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 --broker-listen 127.0.0.1:0 >"$WORK/up.json" & IOP_PID=$!
until [ -s "$WORK/up.json" ]; do sleep 0.1; kill -0 $IOP_PID; done
cat "$WORK/up.json"
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p" "$WORK/up.json"; }
URL=$(field base_url)
echo "--- a stream through iop"
curl -sN "$URL/chat/completions" -H "Authorization: Bearer $(field api_key)" -H 'Content-Type: application/json' \
  -d '{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}' | tail -n 4
BASE=${URL%/v1} KEY=$(field api_key)
echo "--- langchaingo"
"$BIN/langchain" -base "$BASE" -key "$KEY" -model tiny -slow tiny-long 2>&1 | tee "$WORK/all" || :
echo "--- openai-go, anthropic-sdk-go, go-openai" # Ollama has no count_tokens, and never answers 429
"$BIN/goclients" -base "$BASE" -key "$KEY" -auth -model tiny -slow tiny-long -busy "" -skip anthropic/count_tokens 2>&1 | tee -a "$WORK/all" || :

count() { grep -c "$1" "$WORK/all" || :; }
for sdk in openai anthropic gopenai langchain-openai; do
  echo "$sdk: $(count "^PASS $sdk/") passed, $(count "^FAIL $sdk") failed, $(count "^SKIP $sdk/") skipped"
done
passed=$(count ^PASS) failed=$(count ^FAIL) skipped=$(count ^SKIP)
[ "$(count '^[0-9]* passed, ')" = 2 ] || { echo "FAIL a program did not come to its end"; failed=$((failed + 1)); }
# What a caller leaves, Ollama stops: it has ended as much as it was asked, also the
# four answers that never end.
asked=$(curl -sf "$(field admin_url)/metrics" | awk '/^iop_edge_http_attempts_total/ { n += $NF } END { print n + 0 }')
for _ in {1..30}; do
  ended=$(grep -c 'POST *"/v1/' "$WORK/ollama.log" || :)
  [ "$ended" -lt "$asked" ] || break
  sleep 0.1
done
echo "Ollama was asked $asked times and ended $ended answers"
[ "$asked" -gt 20 ] && [ "$ended" = "$asked" ] || { echo "FAIL an answer went on"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
