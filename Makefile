# GPT-2 trainer with ZeRO: train_gpt2 (CPU) and train_gpt2cu (CUDA).
#
#   make                 builds train_gpt2 and test_gpt2; with nvcc also train_gpt2cu and test_gpt2cu
#   make test            the tests of the quick tier          make test-full   all of them
#   make bench           speed of GPT-2 124M on this machine  make bench-ranks  cost of the stages
#   make lint format fuzz help
#
# Variables (each combination has its own folder under build/, so nothing needs `make clean`):
#   PRECISION=fp32|bf16|fp16   element type (default: fp32 on the CPU, bf16 on CUDA)
#   BACKEND=cpu|cuda|cuda_on_cpu   the last runs the CUDA sources without a GPU, for tests
#   DEBUG=1  SAN=1 (ASan+UBSan)  SAN=thread|memory (clang)  HOSTILE=1 (tiny buffers)  COVERAGE=1
#   MPI=0 (one process)  DNNL=0 (own matrix products)  MARCH=native|x86-64-v3|...  CUDA_ARCH=sm_80|sm_90|...
#   CC=gcc|clang  WERROR=1

BACKEND   ?= cpu
PRECISION ?= $(if $(filter cpu,$(BACKEND)),fp32,bf16)
MARCH     ?= native
DEBUG     ?= 0
SAN       ?= 0
HOSTILE   ?= 0
COVERAGE  ?= 0
MPI       ?= 1
DNNL      ?= 1
WERROR    ?= 0
CUDA_ARCH ?= sm_$(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
             grep -om1 '^[0-9.]*' | tr -d .),80)
CUDA_HOME ?= /usr/local/cuda
NVCC      ?= $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc))
MPICC     ?= mpicc

one_of = $(if $(filter $($(1)),$(2)),,$(error $(1)=$($(1)) is not one of: $(2)))
$(call one_of,BACKEND,cpu cuda cuda_on_cpu)
$(call one_of,PRECISION,fp32 bf16 fp16)
$(call one_of,DEBUG,0 1)
$(call one_of,SAN,0 1 thread memory)
$(call one_of,HOSTILE,0 1)
$(call one_of,COVERAGE,0 1)
$(call one_of,MPI,0 1)
$(call one_of,DNNL,0 1)
$(call one_of,WERROR,0 1)

# ---- variant --------------------------------------------------------------------------------------

SUFFIX  := $(if $(filter cpu,$(BACKEND)),,cu)
VARIANT := $(BACKEND)-$(PRECISION)$(if $(filter-out native,$(MARCH)),-$(MARCH))$(if \
  $(filter-out gcc cc,$(CC)),-$(notdir $(CC)))$(if $(filter 1,$(DEBUG)),-debug)$(if \
  $(filter-out 0,$(SAN)),-san$(filter-out 1,$(SAN)))$(if $(filter 1,$(HOSTILE)),-hostile)$(if \
  $(filter 1,$(COVERAGE)),-coverage)$(if $(filter 0,$(MPI)),-nompi)$(if $(filter 0,$(DNNL)),-nodnnl)$(if \
  $(filter cuda,$(BACKEND)),-$(CUDA_ARCH))
BUILD   := build/$(VARIANT)

GIT_VERSION := $(shell git describe --always --dirty 2>/dev/null || echo unknown)
PRECISION_DEFINE := PRECISION_$(shell echo $(PRECISION) | tr a-z A-Z)

# ---- flags ----------------------------------------------------------------------------------------

, := ,
WARNINGS := -Wall -Wextra -Wshadow -Wvla -Wdouble-promotion -Wstrict-prototypes -Wmissing-prototypes
# No fast-math: it removes isfinite. No contraction: shards must round like the whole array.
OPTIMISE := $(if $(filter 1,$(DEBUG)),-O1,$(if $(filter-out 0,$(SAN)),-O1,-O3)) -g -march=$(MARCH) \
            -fno-math-errno -fno-trapping-math -ffp-contract=off
SANITIZE := $(if $(filter 1,$(SAN)),-fsanitize=address$(,)undefined -fno-sanitize-recover=undefined) \
            $(if $(filter thread memory,$(SAN)),-fsanitize=$(SAN)) \
            $(if $(filter-out 0,$(SAN)),-fno-omit-frame-pointer) $(if $(filter 1,$(COVERAGE)),--coverage)
DEFINES  := -D_GNU_SOURCE -D$(PRECISION_DEFINE) $(if $(filter 1,$(HOSTILE)),-DHOSTILE) \
            $(if $(filter 0,$(MPI)),-DNO_MPI,$(if $(filter-out cpu,$(BACKEND)),-DWITH_NCCL)) $(if $(filter 0,$(DNNL)),-DNO_DNNL) \
            $(if $(filter 1,$(DEBUG)),-DDEBUG)
INCLUDES := -Isrc -I.

CFLAGS_ALL = -std=c11 $(OPTIMISE) $(OPENMP) $(SANITIZE) $(WARNINGS) $(if $(filter 1,$(WERROR)),-Werror) \
             $(DEFINES) $(INCLUDES) $(CFLAGS)
OPENMP    := -fopenmp
LIBS      := -lcjson -lz -lm -lpthread
LDFLAGS_ALL = $(OPENMP) $(SANITIZE) $(LDFLAGS)

ifeq ($(MPI),1)
  MPI_CFLAGS := $(shell $(MPICC) --showme:compile 2>/dev/null) -DOMPI_SKIP_MPICXX
  MPI_LIBS   := $(shell $(MPICC) --showme:link 2>/dev/null)
endif
ifeq ($(DNNL)$(BACKEND),1cpu)
  LIBS += -ldnnl
endif

# ---- sources --------------------------------------------------------------------------------------

C_SOURCES := $(wildcard src/core/*.c src/gpt2/*.c src/train/*.c zero/*.c) \
             src/backend/comm/comm_self.c $(if $(filter 1,$(MPI)),src/backend/comm/comm_mpi.c) \
             $(filter-out src/backend/comm/comm_self.c src/backend/comm/comm_mpi.c,$(wildcard src/backend/comm/*.c))
CU_SOURCES :=
ifeq ($(BACKEND),cpu)
  C_SOURCES += $(filter-out $(if $(filter 1,$(DNNL)),src/backend/cpu/matmul_plain.c,src/backend/cpu/matmul_dnnl.c),\
               $(wildcard src/backend/cpu/*.c))
else
  CU_SOURCES += $(wildcard src/backend/cuda/*.cu) $(if $(filter 1,$(MPI)),src/backend/comm/comm_nccl.cu)
endif

OBJECTS   := $(C_SOURCES:%.c=$(BUILD)/%.o) $(CU_SOURCES:%.cu=$(BUILD)/%.o)
LIBRARY   := $(BUILD)/libtrainer.a
PROGRAMS  := $(BUILD)/train_gpt2$(SUFFIX) $(BUILD)/test_gpt2$(SUFFIX)

TEST_SOURCES := $(wildcard dev/test/test_*.c)
TEST_SUPPORT := $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(TEST_SOURCES),$(wildcard dev/test/*.c)))
TESTS        := $(patsubst dev/test/%.c,$(BUILD)/%,$(TEST_SOURCES))

# ---- targets --------------------------------------------------------------------------------------

.PHONY: all cpu cuda programs tests check-tools test test-full bench bench-ranks lint format fuzz help clean
.SECONDARY:
.DELETE_ON_ERROR:

all:
	@$(if $(NVCC),echo "building train_gpt2 (CPU) and train_gpt2cu (CUDA, $(CUDA_ARCH))",echo \
	  "building train_gpt2 (CPU); no nvcc found, so no train_gpt2cu")
	@+$(MAKE) --no-print-directory programs BACKEND=cpu $(if $(filter command environment,$(firstword \
	  $(origin PRECISION))),PRECISION=$(PRECISION))
	@+$(if $(NVCC),$(MAKE) --no-print-directory programs BACKEND=cuda)

cuda:
	@+$(MAKE) --no-print-directory programs BACKEND=cuda

programs: check-tools $(PROGRAMS)
	@cp -f $(PROGRAMS) .

tests: check-tools $(TESTS) $(PROGRAMS)

check-tools:
ifeq ($(MPI),1)
	@$(MPICC) --showme:version >/dev/null 2>&1 || { echo "error: no Open MPI compiler wrapper ($(MPICC)); \
	run scripts/install_deps.sh, or build one process with MPI=0" >&2; exit 2; }
endif
ifeq ($(DNNL)$(BACKEND),1cpu)
	@echo '#include <dnnl.h>' | $(CC) -E -x c - >/dev/null 2>&1 || { echo "error: no oneDNN headers (libdnnl-dev); \
	run scripts/install_deps.sh, or build with DNNL=0" >&2; exit 2; }
endif

$(LIBRARY): $(OBJECTS)
	@rm -f $@
	@$(AR) rcs $@ $^

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(CC) $(CFLAGS_ALL) $(MPI_CFLAGS) -MMD -MP -c $< -o $@

# The version is baked into one object only, which is rebuilt when it changes.
$(BUILD)/src/train/version.o: DEFINES += -DGIT_VERSION='"$(GIT_VERSION)"' -DVARIANT='"$(VARIANT)"'
$(BUILD)/src/train/version.o: $(BUILD)/version.txt
$(BUILD)/version.txt: FORCE
	@mkdir -p $(@D)
	@echo '$(GIT_VERSION)' | cmp -s - $@ || echo '$(GIT_VERSION)' > $@
.PHONY: FORCE

ifeq ($(BACKEND),cpu)
$(BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	@echo "  cc    $<"
	@$(CC) -x c $(CFLAGS_ALL) $(MPI_CFLAGS) -MMD -MP -c $< -o $@
LINK = $(CC) $(LDFLAGS_ALL)
endif
ifeq ($(BACKEND),cuda_on_cpu)
# The sources read 16 bytes at a time through other types, as device code may.
DEFINES += -fno-strict-aliasing
include dev/cuda_on_cpu/rules.mk
endif
ifeq ($(BACKEND),cuda)
NVCC_FLAGS := -std=c++17 -O3 -arch=$(CUDA_ARCH) -lineinfo -Xcompiler -fno-math-errno,-ffp-contract=off \
              $(DEFINES) -DOMPI_SKIP_MPICXX $(INCLUDES)
to_nvcc_link = $(patsubst -pthread,-lpthread,$(patsubst -Wl$(,)%,-Xlinker %,$(1)))
$(BUILD)/%.o: %.cu
	@mkdir -p $(@D)
	@echo "  nvcc  $<"
	@$(NVCC) $(NVCC_FLAGS) $(filter -I%,$(MPI_CFLAGS)) -x cu -MMD -MP -c $< -o $@
LINK  = $(NVCC) -arch=$(CUDA_ARCH) -Xcompiler -fopenmp
LIBS += -lcublasLt $(if $(filter 1,$(MPI)),-lnccl)
MPI_LIBS := $(call to_nvcc_link,$(MPI_LIBS))
endif

# EMU_LIBRARY is the runtime that stands in for CUDA; empty but for BACKEND=cuda_on_cpu.
$(BUILD)/train_gpt2$(SUFFIX): $(BUILD)/train_gpt2.o $(LIBRARY) $(EMU_LIBRARY)
	@echo "  link  $@"
	@$(LINK) $^ $(MPI_LIBS) $(LIBS) -o $@

$(BUILD)/test_gpt2$(SUFFIX): $(BUILD)/test_gpt2.o $(TEST_SUPPORT) $(LIBRARY) $(EMU_LIBRARY)
	@echo "  link  $@"
	@$(LINK) $^ $(MPI_LIBS) $(LIBS) -o $@

$(TESTS): $(BUILD)/test_%: $(BUILD)/dev/test/test_%.o $(TEST_SUPPORT) $(LIBRARY) $(EMU_LIBRARY)
	@echo "  link  $@"
	@$(LINK) $^ $(MPI_LIBS) $(LIBS) -o $@

BENCHES := $(patsubst dev/bench/%.c,$(BUILD)/%,$(wildcard dev/bench/bench_*.c))
$(BENCHES): $(BUILD)/bench_%: $(BUILD)/dev/bench/bench_%.o $(LIBRARY) $(EMU_LIBRARY)
	@echo "  link  $@"
	@$(LINK) $^ $(MPI_LIBS) $(LIBS) -o $@

test:
	@dev/test/run.sh quick
test-full:
	@dev/test/run.sh full
lint:
	@dev/lint.sh
format:
	@git ls-files '*.c' '*.h' '*.cu' '*.cuh' '*.cpp' | xargs clang-format -i
fuzz:
	@dev/fuzz/run.sh
bench-ranks:
	@dev/bench/ranks.sh
bench: check-tools
	@dev/bench/run.sh
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile
clean:
	@rm -rf build train_gpt2 test_gpt2 train_gpt2cu test_gpt2cu

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
