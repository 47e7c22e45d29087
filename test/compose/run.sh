#!/usr/bin/env bash
# Brings the compose file up for real, as `docker compose up` on a clean clone does,
# streams through it from the host, kills a Node and a broker, adds the leaf site,
# and takes all of it down. Prints "N passed, N failed" and leaves nothing behind but
# images.
#
# Where the builder image is not there, one is made from what is here (COMPOSE_PULL=1
# fetches the real one): a static busybox, CA certificates and this machine's Go tree; and the modules come
# from a vendor folder in a copy of the context.
#
# COMPOSE_IMAGE=NAME takes an image that is there instead of building one.
set -euo pipefail
top=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
project=iop-test-$$
export IOP_IMAGE=${COMPOSE_IMAGE:-iop:compose-test} IOP_PORT=0 DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
builder=golang:1.26-bookworm
passed=0 failed=0

if docker compose version >/dev/null 2>&1; then dc=(docker compose); else dc=(docker-compose); fi
compose() { (cd "$work/src" && "${dc[@]}" -p "$project" --profile leaf "$@"); }
core() { (cd "$work/src" && "${dc[@]}" -p "$project" "$@"); }
id() { compose ps -q "$1"; }

cleanup() {
  [ -f "$work/src/docker-compose.yml" ] && compose down -v --remove-orphans -t 5 >/dev/null 2>&1
  rm -rf "$work"
}
trap cleanup EXIT

ok() { passed=$((passed + 1)); echo "ok    $1 (${SECONDS}s)"; }
bad() { failed=$((failed + 1)); echo "FAIL  $1"; }
check() { local what=$1; shift; if "$@"; then ok "$what"; else bad "$what"; fi; }
# until_ok SECONDS COMMAND...: waits for a command to succeed.
until_ok() {
  local end=$((SECONDS + $1)); shift
  until "$@"; do [ $SECONDS -lt $end ] || return 1; read -rt 0.3 <> <(:) || :; done
}

# warm copies what this machine has compiled with the image's flags (`make build` does)
# into a build cache; what it misses is compiled again.
warm() {
  local cache; cache=$(go env GOCACHE)
  (cd "$work/src" && CGO_ENABLED=0 GOFLAGS='-buildvcs=false -mod=vendor' go list -trimpath -deps -export -f '{{.Export}}' ./cmd/iop) |
    sed -n 's,.*/\([0-9a-f]*\)-d$,\1,p' >"$work/outputs"
  find "$cache" -name '*-a' -print0 | xargs -0 grep -lFf "$work/outputs" | sed "s,^$cache/,," >"$work/cached"
  sed 's,^\(..\).*,\1/&-d,' "$work/outputs" >>"$work/cached"
  mkdir -p "$1"
  tar -C "$cache" -c -T "$work/cached" | tar -C "$1" -x
}

stand_in() {
  local root=$work/builder
  mkdir -p "$root"/{bin,tmp,root,etc/ssl/certs,usr/local}
  chmod 1777 "$root/tmp"
  cp "$(command -v busybox || echo /bin/busybox)" "$root/bin/busybox"
  for applet in sh mkdir chmod cp ls cat; do ln -s busybox "$root/bin/$applet"; done
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  cp -a "$(go env GOROOT)" "$root/usr/local/go"
  rm -rf "$root/usr/local/go/test" "$root/usr/local/go/doc" "$root/usr/local/go/api"
  warm "$root/root/.cache/go-build"
  tar -C "$root" -c . | docker import \
    -c 'ENV PATH=/usr/local/go/bin:/bin' -c 'ENV HOME=/root' -c 'ENV GOPATH=/go' -c 'ENV GOTOOLCHAIN=local' - "$builder" >/dev/null
  rm -rf "$root"
}

mkdir "$work/src"
(cd "$top" && git ls-files -co --exclude-standard -z | xargs -0 tar -c --ignore-failed-read 2>/dev/null) | tar -x -C "$work/src"
if [ -z "${COMPOSE_IMAGE:-}" ]; then
  (cd "$work/src" && GOFLAGS=-mod=mod go mod vendor)
  if ! docker image inspect "$builder" >/dev/null 2>&1; then
    if [ -n "${COMPOSE_PULL:-}" ]; then docker pull -q "$builder"; else stand_in; fi
  fi
  echo "      the builder and the context are there (${SECONDS}s)"
  check "it builds" compose build -q init
fi
core up -d >"$work/up.log" 2>&1 || { cat "$work/up.log"; bad "docker compose up"; core logs --no-color --tail=40; }

url=http://$(core port edge 8400)/v1
# sed reads to the end: who stopped at the first match would break the pipe, and fail.
key=$(core logs --no-color init 2>/dev/null | sed -n 's/.*\(sk-iop-[A-Za-z0-9_-]*\).*/\1/p' | sed -n 1p) && [ -n "$key" ] || key=none
healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$(id "$1")")" = healthy ]; }
stream() {
  curl -sN -m 20 "$url/chat/completions" -H "Authorization: Bearer $key" -H 'Content-Type: application/json' \
    -d '{"model":"demo","stream":true,"messages":[{"role":"user","content":"Hello!"}]}' >"$work/answer" || return 1
  grep -q '^data: {' "$work/answer" && grep -qx 'data: \[DONE\]' "$work/answer"
}
refused() { [ "$(curl -so /dev/null -m 5 -w '%{http_code}' "$url/models" -H 'Authorization: Bearer wrong')" = 401 ]; }
# One volume each, its own, and never root.
confined() {
  local s
  for s in broker-1 broker-2 broker-3 edge node-1 node-2; do
    [ "$(docker inspect -f '{{range .Mounts}}{{.Name}} {{end}}{{.Config.User}}' "$(id $s)")" = "${project}_$s 65532:65532" ] || return 1
  done
}
# Inside the Edge's own container, with its own files.
status() { [ "$(core exec -T edge /iop status --config=/data/edge.yaml | grep -cE '^[12] +ready ')" = 2 ]; }
lists() { curl -sf -m 5 "$url/models" -H "Authorization: Bearer $key" | grep -q '"demo"'; }

check "the init job ended well and printed a key" [ "$key" != none ]
for s in broker-1 broker-2 broker-3 node-1 node-2 edge; do check "$s is healthy" until_ok 60 healthy $s; done
check "the model is listed" until_ok 30 lists
check "a stream from the host" stream
check "a wrong key is refused" refused
check "iop status shows both nodes" until_ok 10 status
check "each service has its own volume and is not root" confined
docker kill "$(id node-1)" >/dev/null
check "a stream after a node was killed" stream
docker kill "$(id broker-1)" >/dev/null
check "a stream after a broker was killed" until_ok 60 stream
check "and one more" stream
docker start "$(id broker-1)" >/dev/null
check "the broker is healthy again" until_ok 60 healthy broker-1
if [ -z "${COMPOSE_NO_LEAF:-}" ]; then
  compose up -d --no-recreate >"$work/up.log" 2>&1 || { cat "$work/up.log"; bad "the leaf profile"; }
  check "the node behind the leaf is healthy" until_ok 60 healthy node-3
  for s in node-1 node-2; do docker kill "$(id $s)" >/dev/null 2>&1 || :; done
  check "a stream through the leaf alone" until_ok 60 stream
fi
containers=$(compose ps -q)
compose stop -t 25 >/dev/null 2>&1
ended() {
  local c code
  for c in $containers; do
    code=$(docker inspect -f '{{.State.ExitCode}}' "$c")
    case $code in 0 | 137) ;; *) docker inspect -f '{{.Name}} ended with {{.State.ExitCode}}' "$c"; docker logs --tail 5 "$c"; return 1 ;; esac
  done
}
check "what was told to stop ended well" ended
[ $failed = 0 ] || compose logs --no-color --tail=25
compose down -v --remove-orphans -t 5 >/dev/null 2>&1 || :
left() { docker ps -aq --filter "label=com.docker.compose.project=$project"; docker volume ls -q --filter "name=${project}_"; docker network ls -q --filter "name=${project}_"; }
check "nothing is left behind" [ -z "$(left)" ]
echo "$passed passed, $failed failed"
[ $failed = 0 ]
