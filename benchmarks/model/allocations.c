/* Counts the bytes that torch's CPU allocator holds, which asks for aligned memory. Loaded before a
 * program (LD_PRELOAD); read through ctypes: live_bytes(), peak_bytes(), forget_peak(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20)   /* blocks that may be there at once */
#define SMALLEST 256       /* bytes: smaller ones are not followed */

static struct { uintptr_t block; size_t size; } slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long live, peak, lost;

static unsigned home(uintptr_t block) {
    return (unsigned)(((block >> 6) * 0x9E3779B97F4A7C15ull) >> 44) & (SLOTS - 1);
}

static void note(void *memory, size_t size) {
    uintptr_t block = (uintptr_t)memory;
    if (size < SMALLEST) return;
    pthread_mutex_lock(&lock);
    unsigned at = home(block), steps = 0;
    while (slots[at].block && steps++ < SLOTS) at = (at + 1) & (SLOTS - 1);
    if (slots[at].block) {
        lost += 1;
    } else {
        slots[at].block = block, slots[at].size = size;
        live += (long)size;
        if (live > peak) peak = live;
    }
    pthread_mutex_unlock(&lock);
}

/* Takes a block out and closes the gap, so that no search stops too early. */
static void drop(void *memory) {
    uintptr_t block = (uintptr_t)memory;
    if (block & 63) return;   /* torch aligns to 64 bytes */
    pthread_mutex_lock(&lock);
    unsigned at = home(block);
    while (slots[at].block && slots[at].block != block) at = (at + 1) & (SLOTS - 1);
    if (slots[at].block) {
        live -= (long)slots[at].size;
        unsigned gap = at;
        for (at = (at + 1) & (SLOTS - 1); slots[at].block; at = (at + 1) & (SLOTS - 1)) {
            unsigned wanted = home(slots[at].block);
            if (((at - wanted) & (SLOTS - 1)) >= ((at - gap) & (SLOTS - 1))) {
                slots[gap] = slots[at];
                gap = at;
            }
        }
        slots[gap].block = 0;
    }
    pthread_mutex_unlock(&lock);
}

int posix_memalign(void **memory, size_t alignment, size_t size) {
    static int (*next)(void **, size_t, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "posix_memalign");
    int failed = next(memory, alignment, size);
    if (!failed) note(*memory, size);
    return failed;
}

void free(void *memory) {
    static void (*next)(void *);
    if (!next) next = dlsym(RTLD_NEXT, "free");
    if (memory) drop(memory);
    next(memory);
}

long live_bytes(void) { return live; }
long peak_bytes(void) { return peak; }
long lost_blocks(void) { return lost; }
void forget_peak(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}
