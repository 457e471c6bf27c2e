# rules.mk - builds CUDA sources (.cu) without a GPU, with a C++17 compiler and the runtime beside
# this file. Included by a Makefile that has set BUILD, the folder of its objects; then
#   $(BUILD)/%.o: %.cu     a CUDA source, compiled as C++
#   EMU_LIBRARY            the runtime, to link after the objects
#   LINK                   the linker command
# Read from the including Makefile, if set: SAN=0|1|thread|memory, MPI=0|1 (NCCL over MPI),
# CC (clang chooses clang++), CUDA_HOME, OPTIMISE, DEFINES, INCLUDES, COVERAGE=1.

EMU_DIR   := $(patsubst %/,%,$(dir $(lastword $(MAKEFILE_LIST))))
CUDA_HOME ?= /usr/local/cuda
SAN       ?= 0
MPI       ?= 1
MPICC     ?= mpicc
EMU_COMMA := ,

# ThreadSanitizer and MemorySanitizer, and poison in templates' shared memory, need clang++;
# AddressSanitizer finds overflows of templates' shared memory with g++ only.
EMU_CXX := $(if $(or $(filter thread memory,$(SAN)),$(findstring clang,$(CC))),clang++,g++)
EMU_SANITIZE := $(if $(filter 1,$(SAN)),-fsanitize=address$(EMU_COMMA)undefined -fno-sanitize-recover=undefined) \
                $(if $(filter 1g++,$(SAN)$(EMU_CXX)),-fsanitize-sections=.cudashared.*) \
                $(if $(filter thread,$(SAN)),-fsanitize=thread) \
                $(if $(filter memory,$(SAN)),-fsanitize=memory -fsanitize-memory-track-origins) \
                $(if $(filter-out 0,$(SAN)),-fno-omit-frame-pointer)
EMU_OPTIMISE := $(or $(OPTIMISE),$(if $(filter 0,$(SAN)),-O2,-O1) -g -march=native)
# CET's shadow stack does not know about the switch between fibers. CUDA code reads eight bf16 as one
# uint4 as a matter of course, and nvcc lets it.
EMU_FLAGS := -std=c++17 $(EMU_OPTIMISE) -fcf-protection=none -fno-strict-aliasing -Wall -Wextra -Wno-unknown-pragmas \
             -I$(EMU_DIR)/include -isystem $(CUDA_HOME)/include $(if $(filter 1,$(COVERAGE)),--coverage)
EMU_MPI_CFLAGS := $(if $(filter 1,$(MPI)),$(shell $(MPICC) --showme:compile 2>/dev/null) -DOMPI_SKIP_MPICXX)
EMU_MPI_LIBS   := $(if $(filter 1,$(MPI)),$(shell $(MPICC) --showme:link 2>/dev/null))

# Under ThreadSanitizer the runtime itself stays uninstrumented, but not what reads and writes
# device memory on behalf of the program.
EMU_RUNTIME  := settings fiber block grid report symbols memory stream device
EMU_DEVICE   := cublaslt $(if $(filter 1,$(MPI)),nccl)
EMU_LIBRARY  := $(BUILD)/libcuda_on_cpu.a
EMU_OBJECTS  := $(patsubst %,$(BUILD)/cuda_on_cpu/%.o,$(EMU_RUNTIME) $(EMU_DEVICE))
EMU_RUNTIME_FLAGS := $(if $(filter thread,$(SAN)),-DEMU_TSAN,$(EMU_SANITIZE))

$(patsubst %,$(BUILD)/cuda_on_cpu/%.o,$(EMU_RUNTIME)): $(BUILD)/cuda_on_cpu/%.o: $(EMU_DIR)/%.cpp $(EMU_DIR)/rules.mk
	@mkdir -p $(@D)
	@$(EMU_CXX) $(EMU_FLAGS) $(EMU_RUNTIME_FLAGS) -MMD -MP -c $< -o $@

$(patsubst %,$(BUILD)/cuda_on_cpu/%.o,$(EMU_DEVICE)): $(BUILD)/cuda_on_cpu/%.o: $(EMU_DIR)/%.cpp $(EMU_DIR)/rules.mk
	@mkdir -p $(@D)
	@$(EMU_CXX) $(EMU_FLAGS) $(EMU_SANITIZE) $(EMU_MPI_CFLAGS) -MMD -MP -c $< -o $@

$(EMU_LIBRARY): $(EMU_OBJECTS)
	@rm -f $@
	@$(AR) rcs $@ $^

$(BUILD)/%.o: %.cu $(EMU_DIR)/rules.mk
	@mkdir -p $(@D)
	@echo "  c++   $<"
	@$(EMU_CXX) $(EMU_FLAGS) $(EMU_SANITIZE) $(DEFINES) $(INCLUDES) $(EMU_MPI_CFLAGS) -MMD -MP -x c++ -c $< -o $@

LINK = $(EMU_CXX) $(LDFLAGS_ALL) $(EMU_SANITIZE) $(if $(filter 1,$(COVERAGE)),--coverage) \
       -Wl,-T,$(EMU_DIR)/sh.ld

-include $(EMU_OBJECTS:.o=.d)
