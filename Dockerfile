# One file for all images; docker/images.toml says what each is made of and `make image IMAGE=NAME` builds it.
# Nothing has a default that a forgotten argument could hide behind: a bare `docker build` stops with a message.
ARG BASE=scratch

# ---- base: what both the building and the finished image stand on -----------------------------------------
FROM ${BASE} AS base
ARG PYTHON
ARG APT_PACKAGES=""
ARG APT_SNAPSHOT=""
# A dated archive gives the same packages on every day; without a date (a stand-in base) the base's own is used.
# Python's headers are Triton's need: it compiles a launcher for each kernel.
# DL3008: the dated archive pins the versions. SC2086: words of options and packages are meant to split.
# DL3015: it stands among the options.
# hadolint ignore=DL3008,DL3015,SC2086
RUN set -eu; \
    test -n "${PYTHON}" || { echo "build with: make image IMAGE=NAME" >&2; exit 2; }; \
    . /etc/os-release; \
    options="-o APT::Install-Recommends=false -o Acquire::Retries=3"; \
    if [ -n "${APT_SNAPSHOT}" ]; then \
        case "${ID}" in \
            debian) main="http://snapshot.debian.org/archive/debian/${APT_SNAPSHOT}"; \
                    security="http://snapshot.debian.org/archive/debian-security/${APT_SNAPSHOT} ${VERSION_CODENAME}-security"; \
                    sections="main" ;; \
            ubuntu) main="http://snapshot.ubuntu.com/ubuntu/${APT_SNAPSHOT}"; \
                    security="http://snapshot.ubuntu.com/ubuntu/${APT_SNAPSHOT} ${VERSION_CODENAME}-security"; \
                    sections="main universe" ;; \
            *) echo "no dated archive is known for ${ID}" >&2; exit 2 ;; \
        esac; \
        printf 'deb %s %s %s\ndeb %s %s\n' "${main}" "${VERSION_CODENAME}" "${sections}" "${security}" "${sections}" \
            > /tmp/snapshot.list; \
        options="${options} -o Dir::Etc::SourceList=/tmp/snapshot.list -o Dir::Etc::SourceParts=-"; \
        options="${options} -o Acquire::Check-Valid-Until=false"; \
    fi; \
    packages="${APT_PACKAGES}"; \
    "python${PYTHON}" -c 'import ensurepip, sysconfig, os; open(sysconfig.get_path("include") + "/Python.h")' \
        2>/dev/null || packages="${packages} python${PYTHON}-venv python${PYTHON}-dev"; \
    apt-get ${options} --quiet update; \
    DEBIAN_FRONTEND=noninteractive apt-get ${options} --quiet --yes install ${packages}; \
    rm -rf /tmp/snapshot.list /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/ldconfig/aux-cache \
        /var/cache/debconf/*-old /var/lib/dpkg/*-old /var/log/apt /var/log/*.log; \
    find / -xdev -name __pycache__ -path '*python*' -prune -exec rm -rf {} +; \
    echo 'kernelmark:x:10001:' >> /etc/group; \
    echo 'kernelmark:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd; \
    mkdir /results; \
    chown 10001:10001 /results

# ---- packages: the virtual environment, from hash locks only ------------------------------------------------
FROM base AS packages
ARG PYTHON
ARG LOCKS
# A module that is compiled because it was imported would carry its source's time.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONSAFEPATH=1 PYTHONHASHSEED=0 \
    PYTHONDONTWRITEBYTECODE=1
# pip is a tool of the build and stays in it.
RUN "python${PYTHON}" -m venv /opt/pip && "python${PYTHON}" -m venv --without-pip /opt/kernelmark
# An image's locks are named so; the others change more often than an image should.
COPY requirements/image-*.txt requirements/torch-*.txt /locks/requirements/
# That of a baseline library's environment, which one image alone installs; else one of those above again.
ARG OWN_LOCK=requirements/image-cpu.txt
COPY ${OWN_LOCK} /locks/requirements/
WORKDIR /locks
# Two secrets, both optional: an index of one's own and the certificates to trust. Neither reaches a layer.
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca.crt \
    set -eu; \
    if [ -s /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi; \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi; \
    for lock in ${LOCKS}; do \
        /opt/pip/bin/pip --python /opt/kernelmark/bin/python --cache-dir /var/cache/pip install --quiet \
            --no-compile --no-deps --require-hashes --only-binary :all: -r "${lock}"; \
    done
# Compiled here, since nothing can be written later, and without the sources' times, which differ each time.
# Some packages carry files for other Pythons, which do not compile and are never imported.
RUN /opt/kernelmark/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash \
        "/opt/kernelmark/lib/python${PYTHON}/site-packages" || true

# ---- compiled: what has to be built against this torch; the finished image holds nothing of the compiler ---------
FROM packages AS compiled
ARG PYTHON
ARG ARCHITECTURES=""
# The layer is kept by the hashes of both locks and of the environment above.
ARG SOURCES=""
ARG SOURCES_LOCK=requirements/image-cpu.txt
ARG COMPILER_LOCK=requirements/image-cpu.txt
COPY ${SOURCES_LOCK} ${COMPILER_LOCK} /locks/requirements/
COPY docker/nvcc /usr/local/bin/nvcc
# A wheel that was compiled elsewhere from what a lock of sources names; SOURCES is then the lock that has its hash. Else one
# of the files above again.
ARG WHEEL=requirements/image-cpu.txt
COPY ${WHEEL} /given/
# The compiler goes into this stage's environment, beside torch's headers of CUDA, of which only /compiled is taken.
# Its libraries have no names without a version, which linkers look for. Of mamba-ssm only Triton's operators are called.
# pip's cache would give a wheel that was built for other architectures or beside another torch: it is not asked. Nor are
# the places that packages' own scripts take wheels without a hash from, which *_FORCE_BUILD forbids.
# DL4006: the pipe begins with printf, which does not fail.
# hadolint ignore=DL4006
RUN --mount=type=cache,target=/var/cache/pip,sharing=locked \
    --mount=type=secret,id=pip_conf,target=/run/secrets/pip.conf \
    --mount=type=secret,id=ca_bundle,target=/run/secrets/ca.crt \
    set -eu; \
    mkdir /compiled; \
    if [ -z "${SOURCES}" ]; then exit 0; fi; \
    install() { \
        /opt/pip/bin/pip --python /opt/kernelmark/bin/python install --quiet --no-index --no-deps --no-compile \
            --target /compiled "$@"; \
        /opt/kernelmark/bin/python -m compileall -qq --invalidation-mode unchecked-hash /compiled || true; \
    }; \
    case "${WHEEL}" in *.whl) \
        install --require-hashes --only-binary :all: --find-links /given -r "${SOURCES}"; exit 0 ;; \
    esac; \
    if [ -s /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi; \
    if [ -s /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi; \
    /opt/pip/bin/pip --python /opt/kernelmark/bin/python --cache-dir /var/cache/pip install --quiet \
        --no-deps --require-hashes --only-binary :all: -r "${COMPILER_LOCK}"; \
    export CUDA_HOME="/opt/kernelmark/lib/python${PYTHON}/site-packages/nvidia/cu13"; \
    for library in "${CUDA_HOME}"/lib/*.so.*; do \
        name="${library%%.so.*}.so"; [ -e "${name}" ] || ln -s "${library}" "${name}"; done; \
    NVCC_ARCHITECTURES="$(printf %s "${ARCHITECTURES}" | tr ';' ' ' | tr -d .)"; \
    FLASH_ATTN_CUDA_ARCHS="$(printf %s "${ARCHITECTURES}" | tr -dc '0-9;')"; \
    export NVCC_ARCHITECTURES FLASH_ATTN_CUDA_ARCHS NVTE_CUDA_ARCHS="${FLASH_ATTN_CUDA_ARCHS}" NVTE_FRAMEWORK=pytorch; \
    export NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1; \
    export PATH="${CUDA_HOME}/bin:/opt/kernelmark/bin:${PATH}" PYTORCH_NVCC=/usr/local/bin/nvcc; \
    export TORCH_CUDA_ARCH_LIST="${ARCHITECTURES}" CAUSAL_CONV1D_FORCE_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
        MAMBA_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE; \
    /opt/pip/bin/pip --python /opt/kernelmark/bin/python --no-cache-dir wheel --quiet --no-deps \
        --no-build-isolation --require-hashes --wheel-dir /wheels -r "${SOURCES}"; \
    install /wheels/*.whl

# ---- program: this package, built with what the lock has -----------------------------------------------------
FROM packages AS program
ARG SOURCE_DATE_EPOCH
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY suite suite
COPY kernels kernels
COPY baselines baselines
COPY registry registry
RUN set -eu; \
    /opt/pip/bin/pip --python /opt/kernelmark/bin/python wheel --quiet --no-deps --no-build-isolation \
        --wheel-dir /wheel .; \
    /opt/pip/bin/pip --python /opt/kernelmark/bin/python install --quiet --no-index --no-deps --no-compile \
        --target /program /wheel/*.whl; \
    /opt/kernelmark/bin/python -m compileall -q --invalidation-mode unchecked-hash /program

# ---- the image -------------------------------------------------------------------------------------------------
FROM base
ARG PYTHON
COPY --from=packages /opt/kernelmark /opt/kernelmark
COPY --from=compiled /compiled /opt/kernelmark/lib/python${PYTHON}/site-packages
COPY --from=program /program /opt/kernelmark/lib/python${PYTHON}/site-packages
COPY docker/entrypoint /opt/kernelmark/bin/kernelmark
ARG ARCHITECTURES=""
ARG COMMIT=""
# All that is written goes to /results or to memory at /tmp. Places of caches are given here, since the home
# directory of a user who must write nothing is no place for them.
ENV PATH=/opt/kernelmark/bin:${PATH} \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    KERNELMARK_HOME=/results \
    KERNELMARK_COMMIT=${COMMIT} \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    TORCH_CUDA_ARCH_LIST=${ARCHITECTURES} \
    HF_HUB_OFFLINE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /results
ENTRYPOINT ["kernelmark"]
CMD ["doctor"]
