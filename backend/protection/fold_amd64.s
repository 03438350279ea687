#include "textflag.h"

// A register has a polynomial of 128 bits, whose highest power is the first bit of the data. It moves ahead by D bits, modulo the
// polynomial of the guard, if its low half is multiplied by x^D and its high half by x^(D+64).
DATA ahead512<>+0(SB)/8, $0x1069
DATA ahead512<>+8(SB)/8, $0xdd31
GLOBL ahead512<>(SB), RODATA|NOPTR, $16

DATA ahead128<>+0(SB)/8, $0xa010
DATA ahead128<>+8(SB)/8, $0x1faa
GLOBL ahead128<>(SB), RODATA|NOPTR, $16

DATA reverse<>+0(SB)/8, $0x08090a0b0c0d0e0f
DATA reverse<>+8(SB)/8, $0x0001020304050607
GLOBL reverse<>(SB), RODATA|NOPTR, $16

// LOAD loads the 16 bytes at from.
#define LOAD(from, a) \
	MOVOU  from, a \
	PSHUFB X9, a

// AHEAD moves the polynomial of a ahead by the factors of X8, and adds it to that of b.
#define AHEAD(a, b) \
	MOVO      a, X4         \
	PCLMULQDQ $0x00, X8, a  \
	PCLMULQDQ $0x11, X8, X4 \
	PXOR      a, b          \
	PXOR      X4, b

// NEXT moves the polynomial of a ahead to the 16 bytes at from.
#define NEXT(from, a) \
	LOAD(from, X5) \
	AHEAD(a, X5)   \
	MOVO X5, a

// func fold(p *byte, n int, rest *[16]byte)
TEXT ·fold(SB), NOSPLIT, $0-24
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	MOVQ rest+16(FP), DI

	MOVOU reverse<>(SB), X9
	MOVOU ahead512<>(SB), X8
	LOAD((SI), X0)
	LOAD(16(SI), X1)
	LOAD(32(SI), X2)
	LOAD(48(SI), X3)
	JMP   check

block:
	NEXT((SI), X0)
	NEXT(16(SI), X1)
	NEXT(32(SI), X2)
	NEXT(48(SI), X3)

check:
	ADDQ $64, SI
	SUBQ $64, CX
	JNZ  block

	MOVOU ahead128<>(SB), X8
	AHEAD(X0, X1)
	AHEAD(X1, X2)
	AHEAD(X2, X3)
	PSHUFB X9, X3
	MOVOU  X3, (DI)
	RET
