// train/watchdog.c - names the rank that does not come. See watchdog.h.
#include "train/watchdog.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backend/comm/table.h"

#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)

static struct {
    CommTable* table; // NULL: not started
    CommRecord* mine;
    int world_size, timeout_seconds;
    bool is_running, stops;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} watchdog = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static double last_tick(const CommTable* table) {
    double last = 0;
    for (int i = 0; i < table->num_records; i++) {
        double ticked;
        __atomic_load(&table->records[i].ticked, &ticked, __ATOMIC_ACQUIRE);
        if (ticked > last) last = ticked;
    }
    return last;
}

static bool is_inside(const CommRecord* record, long seq) {
    return LOAD(record->inside) && LOAD(record->seq) == seq;
}

// The first rank of this host that is not inside collective `seq`; NULL: all are.
static const CommRecord* find_missing(const CommTable* table, long seq) {
    for (int i = 0; i < table->num_records; i++) {
        if (!is_inside(&table->records[i], seq)) return &table->records[i];
    }
    return NULL;
}

// A list of the ranks that stand inside collective `seq`.
static void list_ranks(const CommTable* table, long seq, char* text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < table->num_records && used + 12 < size; i++) {
        const CommRecord* record = &table->records[i];
        if (!is_inside(record, seq)) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%d", used ? "," : "", record->rank);
    }
}

// Does process `pid` of this host stand still, by a signal or a debugger (proc(5): state T or t)?
static bool is_stopped(int pid) {
    char path[32], stat[400] = "";
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE* file = fopen(path, "r");
    if (!file) return false;
    stat[fread(stat, 1, sizeof(stat) - 1, file)] = '\0';
    fclose(file);
    const char* name_end = strrchr(stat, ')');
    return name_end && (name_end[2] == 'T' || name_end[2] == 't');
}

// All ranks of this host have entered what they wait in.
NO_RETURN static void report_inside(CommTable* table, const char* entry, const char* ranks,
                                    double seconds) {
    for (int i = 0; i < table->num_records; i++) {
        const CommRecord* record = &table->records[i];
        if (!is_stopped(record->pid)) continue;
        table_fail(table,
                   "rank %d (process %d) is stopped inside %s; ranks %s are there for %.0f s",
                   record->rank, record->pid, entry, ranks, seconds);
    }
    table_fail(table, "ranks %s wait in %s for %.0f s; %s", ranks, entry, seconds,
               table->num_records < watchdog.world_size
                   ? "the rank they wait for is on another host"
                   : "all have come, and none goes on");
}

NO_RETURN static void report(CommTable* table, const CommRecord* waiting, double seconds) {
    const long seq = waiting->seq;
    const CommRecord* missing = find_missing(table, seq);
    char entry[120], waiting_ranks[200];
    comm_entry_text(&waiting->history[seq % TABLE_HISTORY], entry, sizeof(entry));
    list_ranks(table, seq, waiting_ranks, sizeof(waiting_ranks));
    if (!missing) report_inside(table, entry, waiting_ranks, seconds);
    char doing[140] = "";
    if (missing->activity[0]) snprintf(doing, sizeof(doing), " (%s)", missing->activity);
    if (missing->seq > seq) {
        table_fail(table,
                   "rank %d has not entered %s, it has gone on to seq %ld%s; ranks %s wait "
                   "there for %.0f s",
                   missing->rank, entry, missing->seq, doing, waiting_ranks, seconds);
    }
    table_fail(table, "rank %d has not entered %s%s; ranks %s wait there for %.0f s", missing->rank,
               entry, doing, waiting_ranks, seconds);
}

enum { FILES_PATIENCE = 30, OTHER_HOST_SECONDS = 5 };

static void look(void) {
    CommTable* table = watchdog.table;
    const CommRecord* mine = watchdog.mine;
    if (!LOAD(mine->inside)) return;
    double entered;
    __atomic_load(&mine->entered, &entered, __ATOMIC_ACQUIRE);
    const double ticked = last_tick(table), now = now_seconds();
    double limit = watchdog.timeout_seconds;
    // Files are slow, an fsync gives no tick, and no other host sees those of the one that writes.
    if (mine->activity[0]) limit *= FILES_PATIENCE;
    // The watchdog of another host, where the rank is that does not come, shall name it first.
    if (table->num_records < watchdog.world_size && !find_missing(table, LOAD(mine->seq)))
        limit += OTHER_HOST_SECONDS;
    if (now - (ticked > entered ? ticked : entered) < limit) return;
    report(table, mine, now - entered);
}

static void* watch(void* unused) {
    (void)unused;
    pthread_mutex_lock(&watchdog.lock);
    while (!watchdog.stops) {
        struct timespec next;
        clock_gettime(CLOCK_REALTIME, &next);
        next.tv_nsec += 200 * 1000 * 1000;
        next.tv_sec += next.tv_nsec / 1000000000;
        next.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&watchdog.wake, &watchdog.lock, &next);
        if (!watchdog.stops) look();
    }
    pthread_mutex_unlock(&watchdog.lock);
    return NULL;
}

void watchdog_start(Comm* comm, int timeout_seconds) {
    if (comm->world_size == 1) return; // nobody to wait for
    watchdog.table = comm->table;
    watchdog.mine = table_record(comm);
    watchdog.world_size = comm->world_size;
    watchdog.timeout_seconds = comm->timeout_seconds = timeout_seconds;
    watchdog.stops = false;
    watchdog_activity("");
    CHECK(pthread_create(&watchdog.thread, NULL, watch, NULL) == 0, "no thread for the watchdog");
    watchdog.is_running = true;
}

void watchdog_stop(void) {
    if (!watchdog.is_running) return;
    pthread_mutex_lock(&watchdog.lock);
    watchdog.stops = true;
    pthread_cond_signal(&watchdog.wake);
    pthread_mutex_unlock(&watchdog.lock);
    pthread_join(watchdog.thread, NULL);
    watchdog.is_running = false;
    watchdog.table = NULL;
}

void watchdog_activity(const char* what) {
    if (!watchdog.table) return;
    snprintf(watchdog.mine->activity, sizeof(watchdog.mine->activity), "%s", what);
    watchdog_tick();
}

void watchdog_tick(void) {
    if (!watchdog.table) return;
    double now = now_seconds();
    __atomic_store(&watchdog.mine->ticked, &now, __ATOMIC_RELEASE);
}
