// backend/comm/comm.c - choosing a transport, and agreement of all ranks on top of any of them.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/comm.h"
#include "backend/comm/table.h"
#include "backend/ops.h"

// ---- opening ------------------------------------------------------------------------------------

// How many ranks the launcher says there are, and the variable that says so; 0 without a launcher.
static int launcher_ranks(const char** variable) {
    static const char* const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS",
                                            "SLURM_NTASKS"};
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++) {
        const char* text = getenv(variables[i]);
        if (!text || atoi(text) < 1) continue;
        *variable = variables[i];
        return atoi(text);
    }
    return 0;
}

static bool is_kind(const CommOptions* options, const char* kind) {
    return options->kind && strcmp(options->kind, kind) == 0;
}

// N processes that each believe to be alone would train N times the same and write the same files.
static bool check_launcher(const Comm* comm, Error* error) {
    const char* variable = NULL;
    const int ranks = launcher_ranks(&variable);
    if (ranks <= 1 || comm->world_size > 1) return true;
#ifdef NO_MPI
    return error_set(error, EXIT_USAGE,
                     "%s=%d, but this program is built without MPI and sees one rank; "
                     "build it without MPI=0",
                     variable, ranks);
#else
    return error_set(error, EXIT_USAGE,
                     "%s=%d, but this process sees one rank: the launcher belongs to another MPI; "
                     "use the mpirun of the MPI this program was built with, or srun --mpi=pmix "
                     "(to run one rank on purpose, unset %s)",
                     variable, ranks, variable);
#endif
}

Comm* comm_open(const CommOptions* options, Error* error) {
    Comm* comm = NULL;
#ifdef NO_MPI
    comm = comm_self_create();
#else
    const char* variable;
    if (is_kind(options, "self") || launcher_ranks(&variable) == 0) {
        comm = comm_self_create();
    } else {
        comm = comm_mpi_create(!is_kind(options, "messages"), error);
    }
#endif
    const bool checks = !is_kind(options, "self") && !options->may_be_alone;
    if (!comm || (checks && !check_launcher(comm, error))) return NULL;
    comm->link_bytes_s = options->link_mb_s * 1e6;
    check_set_rank(comm->rank, comm->world_size);
    return comm;
}

Comm* comm_attach_device(Comm* comm, const CommOptions* options, Error* error) {
#ifdef WITH_NCCL
    const bool is_default = !options->kind || is_kind(options, "auto");
    if (comm->world_size > 1 && (is_default || is_kind(options, "nccl"))) {
        return comm_nccl_create(comm, error);
    }
#else
    if (is_kind(options, "nccl")) {
        error_set(error, EXIT_USAGE, "--comm nccl: this program is built without NCCL");
    }
#endif
    return comm;
}

// ---- agreement ----------------------------------------------------------------------------------

// The error of the lowest rank that has one, on all ranks. That rank, or -1; and how many have one.
static int lowest_error(Comm* comm, const Error* mine, Error* agreed, int* num_errors) {
    Error* all = checked_calloc((size_t)comm->world_size, sizeof(Error));
    comm->host_all_gather(comm, all, mine, sizeof(Error));
    int lowest = -1;
    *num_errors = 0;
    for (int rank = comm->world_size - 1; rank >= 0; rank--) {
        if (all[rank].code == 0) continue;
        lowest = rank;
        ++*num_errors;
    }
    if (lowest >= 0) *agreed = all[lowest];
    free(all);
    return lowest;
}

void comm_agree(Comm* comm, const Error* error) {
    Error agreed;
    int num_errors;
    const int rank = lowest_error(comm, error, &agreed, &num_errors);
    if (rank < 0) return;
    if (rank == comm->rank) {
        char host[HOST_NAME_MAX + 1] = "", where[HOST_NAME_MAX + 40] = "";
        gethostname(host, sizeof(host) - 1);
        if (num_errors < comm->world_size) // not of the options or files that all ranks share
            snprintf(where, sizeof(where), " (on rank %d, host %s)", rank, host);
        fprintf(stderr, "error: %s%s\n", agreed.text, where);
    }
    fflush(NULL);
    comm->barrier(comm); // the line is out before a launcher sees the first exit
    comm->free(comm);
    exit(agreed.code);
}

bool comm_all_ok(Comm* comm, Error* error) {
    Error agreed;
    int num_errors;
    if (lowest_error(comm, error, &agreed, &num_errors) < 0) return true;
    *error = agreed;
    return false;
}

bool comm_check_same(Comm* comm, uint64_t value, const char* what, Error* error) {
    uint64_t* all = checked_calloc((size_t)comm->world_size, sizeof(uint64_t));
    comm->host_all_gather(comm, all, &value, sizeof(value));
    int rank = 0;
    while (rank < comm->world_size && all[rank] == all[0]) rank++;
    const bool same = rank == comm->world_size;
    free(all);
    if (same) return true;
    return error_set(error, EXIT_USAGE,
                     "%s on rank %d differ from those on rank 0; start all ranks with the same "
                     "program, options and files",
                     what, rank);
}

// ---- exchange buffer and folding ----------------------------------------------------------------

size_t comm_exchange_bytes(int world_size) {
    // What arrives from the others while gradients are folded from messages, and as much again to
    // send from where messages cannot read device memory. Large enough to amortise a message.
    return world_size > 1 ? (size_t)8 << 20 : 0;
}

void comm_fold(const Comm* comm, void* acc, DType acc_dtype, bool accumulate, const void** sources,
               DType dtype, size_t elems, void* spare) {
    const int rank = comm->rank;
    if (sources[rank] == acc && rank >= FOLD_MAX_SOURCES) {
        device_copy(spare, acc, elems * dtype_bytes(dtype), STREAM_COMM);
        sources[rank] = spare;
    }
    for (int first = 0; first < comm->world_size; first += FOLD_MAX_SOURCES) {
        const int n = (int)min_size(FOLD_MAX_SOURCES, (size_t)(comm->world_size - first));
        fold(acc, acc_dtype, accumulate || first > 0, sources + first, dtype, n, elems,
             STREAM_COMM);
    }
}
