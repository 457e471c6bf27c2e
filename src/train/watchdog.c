// train/watchdog.c - names the rank that does not come. See watchdog.h.
#include "train/watchdog.h"

#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "backend/comm/table.h"

#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)

static struct {
    Comm* comm;
    int timeout_seconds;
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

// A list of the ranks that stand inside collective `seq` (or of the others).
static void list_ranks(const CommTable* table, long seq, bool inside, char* text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < table->num_records && used + 12 < size; i++) {
        const CommRecord* record = &table->records[i];
        if ((LOAD(record->inside) && LOAD(record->seq) == seq) != inside) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%d", used ? "," : "", record->rank);
    }
}

NO_RETURN static void report(CommTable* table, const CommRecord* waiting, double seconds) {
    const long seq = waiting->seq;
    const CommRecord* missing = NULL;
    for (int i = 0; i < table->num_records && !missing; i++) {
        const CommRecord* record = &table->records[i];
        if (!LOAD(record->inside) || LOAD(record->seq) != seq) missing = record;
    }
    char entry[120], waiting_ranks[200];
    comm_entry_text(&waiting->history[seq % TABLE_HISTORY], entry, sizeof(entry));
    list_ranks(table, seq, true, waiting_ranks, sizeof(waiting_ranks));
    if (!missing) {
        table_fail(table,
                   "ranks %s wait in %s for %.0f s; the rank they wait for is on another host",
                   waiting_ranks, entry, seconds);
    }
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

static void look(void) {
    CommTable* table = watchdog.comm->table;
    const CommRecord* mine = table_record(watchdog.comm);
    if (!LOAD(mine->inside)) return;
    double entered;
    __atomic_load(&mine->entered, &entered, __ATOMIC_ACQUIRE);
    const double ticked = last_tick(table), now = now_seconds();
    if (now - (ticked > entered ? ticked : entered) < watchdog.timeout_seconds) return;
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
    watchdog.comm = comm;
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
    watchdog.comm = NULL;
}

void watchdog_activity(const char* what) {
    if (!watchdog.comm) return;
    CommRecord* record = table_record(watchdog.comm);
    snprintf(record->activity, sizeof(record->activity), "%s", what);
    watchdog_tick();
}

void watchdog_tick(void) {
    if (!watchdog.comm) return;
    double now = now_seconds();
    __atomic_store(&table_record(watchdog.comm)->ticked, &now, __ATOMIC_RELEASE);
}
