# Horovod with NCCL, Gloo and MPI, PyTorch for CUDA 13.0 and this package. From the root of the repository:
#   docker build -f docker/gpu.Dockerfile -t hvd-compress:gpu .
# The CUDA toolkit is that of the wheels which PyTorch needs, so that both are of one version; the driver is the host's.
FROM debian:bookworm-20251117-slim
ENV DEBIAN_FRONTEND=noninteractive NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton, too, calls a C compiler, when it first meets a kernel.
RUN apt-get update && \
    apt-get install -y --no-install-recommends \
        ca-certificates g++ make openssh-client openssh-server python3.11-dev python3.11-venv && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --create-home --shell /bin/bash trainer && install -d -o trainer -m 700 /home/trainer/.ssh
WORKDIR /opt/hvd_compress
# The package's sources come last: a change of them builds none of this anew.
COPY LICENSE pyproject.toml requirements-cuda.lock ./
COPY tools tools
COPY hvd_compress/_version.py hvd_compress/
RUN touch README.md && python3.11 tools/setup_env.py cuda && rm -rf /root/.cache
COPY docker/ssh.conf /etc/ssh/ssh_config.d/
COPY docker/sshd.sh docker/launch.sh /usr/local/bin/
COPY hvd_compress hvd_compress
COPY examples examples
COPY tests tests
ENV PATH=/opt/hvd_compress/.venv-cuda/bin:$PATH
RUN python -m compileall -q hvd_compress
USER trainer
WORKDIR /home/trainer
RUN python -m hvd_compress.ops.kernels.cpu
EXPOSE 2222
CMD ["sshd.sh"]
