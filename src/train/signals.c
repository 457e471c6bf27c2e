// train/signals.c - see signals.h.
#include "train/signals.h"

#include <signal.h>
#include <stddef.h>
#include <unistd.h>

static volatile sig_atomic_t first_signal;

// Only what is safe in a handler. 128 + n is how shells report a process that signal n ended.
static void on_signal(int number) {
    if (first_signal) _exit(128 + number);
    first_signal = number;
}

void signals_install(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_handler = SIG_IGN;
    sigaction(SIGXFSZ, &action, NULL);
}

int signals_received(void) { return first_signal; }
