# Prometheus and Alertmanager as Debian packages them, for a machine that reaches no container registry.
ARG BASE
FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends prometheus prometheus-alertmanager \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 65534 --group 65534 /alertmanager \
    && rm -rf /prometheus /etc/prometheus && install --directory --owner 65534 --group 65534 /prometheus
USER 65534:65534
