// The kernels in a process of their own, as one compiled for another kind of CPU runs under an emulator. `emulated.py`
// sends calls; all numbers of the protocol are int64.
#include <cstdio>
#include <vector>

#include "kernels.cpp"

struct Range {  // memory of the caller, with a copy here
  int64_t address, size;
  char* copy;
};

static void read_bytes(void* to, size_t count) {
  if (count && fread(to, 1, count, stdin) != count) exit(0);  // the caller has closed
}
static int64_t read_number() {
  int64_t x;
  read_bytes(&x, sizeof x);
  return x;
}

// Where the bytes of an address of the caller are here; null stays.
static int64_t here(const std::vector<Range>& ranges, int64_t address) {
  if (!address) return 0;
  for (const Range& range : ranges)
    if (range.address <= address && address <= range.address + range.size) return (int64_t)range.copy + address - range.address;
  fprintf(stderr, "an address that was not sent\n");
  abort();
}

int main() {
  for (;;) {
    const int64_t function = read_number();
    std::vector<Range> ranges(read_number());
    for (Range& range : ranges) {
      range.address = read_number(), range.size = read_number();
      range.copy = (char*)malloc(range.size + 1);
      read_bytes(range.copy, range.size);
    }
    for (int64_t left = read_number(); left > 0; left--) {  // places of addresses within structures
      int64_t* place = (int64_t*)here(ranges, read_number());
      *place = here(ranges, *place);
    }
    std::vector<int64_t> a(read_number());
    for (int64_t& x : a) {
      const bool address = read_number();
      x = read_number();
      if (address) x = here(ranges, x);
    }
    int64_t result;
    if (function == 0) result = attend((Buffers*)a[0], (Views*)a[1], a[2], a[3], a[4], a[5], a[6], a[7], *(float*)a[8]);
    else if (function == 1) result = pack(a[0], a[1], a[2], a[3], a[4], a[5], (Source*)a[6], a[7], (int32_t*)a[8], (uint8_t*)a[9], (bf16*)a[10], (uint8_t*)a[11], (float*)a[12]);
    else if (function == 3) result = prompt((Buffers*)a[0], (Views*)a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], *(float*)a[11]);
    else if (function == 4) result = multiply((int32_t*)a[0], (uint16_t*)a[1], (int32_t*)a[2], a[3], a[4], a[5], a[6], a[7], a[8], (void*)a[9], a[10], a[11], (void*)a[12], a[13], a[14]);
    else if (function == 5) dequantise((int32_t*)a[0], (uint16_t*)a[1], (int32_t*)a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], (void*)a[10], a[11]), result = 0;
    else result = clusters(a[0], a[1], a[2], a[3], a[4], a[5], a[6], (Source*)a[7], a[8], (int32_t*)a[9], (int32_t*)a[10], (float*)a[11], (float*)a[12], (float*)a[13], (float*)a[14], a[15]);
    fwrite(&result, sizeof result, 1, stdout);
    for (Range& range : ranges) fwrite(range.copy, 1, range.size, stdout), free(range.copy);
    fflush(stdout);
  }
}
