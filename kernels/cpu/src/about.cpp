// What compiled this library.
extern "C" const char* pask_compiler() { return __VERSION__; }
