#!/bin/sh
# Makes an authority and the syncer's certificate in certificates/, valid for a year:
#   sh certificates.sh ADDRESS      the name or IP address by which learners dial the syncer
set -eu

if [ $# -ne 1 ]; then
    echo "usage: sh certificates.sh ADDRESS (the name or IP address by which learners dial the syncer)" >&2
    exit 2
fi
case "$1" in
    *[!0-9.]*) subject="DNS:$1" ;;
    *) subject="IP:$1" ;;
esac

mkdir -p certificates
cd certificates
umask 077
# The authority signs one certificate; its key is thrown away afterwards.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 \
    -subj "/CN=decoupled-diloco" -keyout ca.key -out ca.pem 2>/dev/null
openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
    -subj "/CN=syncer" -keyout syncer.key -out syncer.csr 2>/dev/null
printf 'subjectAltName = %s,DNS:localhost,IP:127.0.0.1\n' "$subject" > syncer.ext
openssl x509 -req -days 365 -in syncer.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
    -extfile syncer.ext -out syncer.pem 2>/dev/null
rm -f ca.key ca.srl syncer.csr syncer.ext
chmod 644 ca.pem syncer.pem
echo "certificates/: ca.pem for every learner; syncer.pem and syncer.key for the syncer, good for $1 and localhost"
