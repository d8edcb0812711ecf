#!/usr/bin/env bash
# A stand-in for the official Python image, for a machine that reaches Debian's packages but no container registry.
#   base-image.sh TAG
# Needs root, debootstrap and a running Docker engine. The machine's own certificates go in, so that package installs
# inside a build work as they do outside it.
set -euo pipefail
tag=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" >/dev/null
ln -sf /usr/bin/python3 "$root/usr/local/bin/python3"
ln -sf /usr/bin/python3 "$root/usr/local/bin/python"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" -c . | docker import \
  --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
  --change 'CMD ["python3"]' - "$tag"
