# Horovod with Gloo and MPI, PyTorch, TensorFlow and this package, for CPUs. From the root of the repository:
#   docker build -f docker/cpu.Dockerfile -t hvd-compress:cpu .
FROM debian:bookworm-20251117-slim AS base
ENV DEBIAN_FRONTEND=noninteractive

# Horovod and what requirements.lock pins. The package's sources come last: a change of them builds none of this anew.
FROM base AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ make python3.11-dev python3.11-venv
WORKDIR /opt/hvd_compress
# PyTorch's own index has a build without CUDA, which is a tenth as large.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY Makefile LICENSE pyproject.toml requirements.lock ./
COPY tools tools
COPY hvd_compress/_version.py hvd_compress/
RUN touch README.md && make setup && rm -rf /root/.cache

FROM base
RUN apt-get update && \
    apt-get install -y --no-install-recommends openssh-client openssh-server python3.11-minimal libpython3.11-stdlib && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --shell /bin/bash trainer && install -d -o trainer -m 700 /home/trainer/.ssh
COPY docker/ssh.conf /etc/ssh/ssh_config.d/
COPY docker/sshd.sh docker/launch.sh /usr/local/bin/
COPY --from=build /opt/hvd_compress /opt/hvd_compress
COPY hvd_compress /opt/hvd_compress/hvd_compress
COPY examples /opt/hvd_compress/examples
# horovodrun imports TensorFlow, which would tell at length on each start that there is no GPU.
ENV PATH=/opt/hvd_compress/.venv/bin:$PATH TF_CPP_MIN_LOG_LEVEL=3
RUN python -m compileall -q /opt/hvd_compress/hvd_compress
USER trainer
WORKDIR /home/trainer
# The kernels for CPUs are compiled here, and not in each container.
RUN python -m hvd_compress.ops.kernels.cpu
EXPOSE 2222
CMD ["sshd.sh"]
