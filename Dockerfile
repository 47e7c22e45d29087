# One static binary on nothing else. With a vendor folder in the context the
# build needs no network.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY . .
ARG VERSION=dev
ENV CGO_ENABLED=0 GOFLAGS=-buildvcs=false
# /tmp is for request bodies above edge.limits.body_memory.
RUN mkdir -p /out/etc/ssl/certs /out/tmp \
 && chmod 1777 /out/tmp \
 && cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ \
 && go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/iop ./cmd/iop

FROM scratch
COPY --from=build /out/ /
USER 65532:65532
ENTRYPOINT ["/iop"]
CMD ["--help"]
