/* Open regions in one thread while others allocate and free; ThreadSanitizer reports unguarded reads. */
#include <pthread.h>
#include <stdint.h>

#include "blocks.h"

enum { ALLOCATING = 2, ROUNDS = 2000 };

int counter_open(int number, Region **opened);
void counter_close(Region **opened);
int counter_record(Region *region, uint32_t most);
int counter_add(uintptr_t address, int64_t bytes, int number, int is_new);
void counter_remove(uintptr_t address, int number);
uint32_t counter_live(void);
int counter_open_regions(void);

static void *allocate(void *first) {
    for (int round = 0; round < ROUNDS; round++) {
        uintptr_t address = (uintptr_t)first + 64u * (round % 8);
        counter_add(address, 64, CPU_DEVICE, 1);
        any_recording();
        counter_live();
        counter_open_regions();
        counter_remove(address, CPU_DEVICE);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[ALLOCATING];
    for (uintptr_t i = 0; i < ALLOCATING; i++) pthread_create(&threads[i], NULL, allocate, (void *)((i + 1) << 20));
    for (int round = 0; round < ROUNDS; round++) {
        Region *region = NULL;
        counter_open(CPU_DEVICE, &region);
        counter_record(region, 16);
        counter_close(&region);
    }
    for (int i = 0; i < ALLOCATING; i++) pthread_join(threads[i], NULL);
    return counter_live() || counter_open_regions() ? 2 : 0;
}
