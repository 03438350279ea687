#include "textflag.h"

// Bits are reflected: the first bit of the data is the highest power of x. A register has polynomials of 128 bits. One of them moves
// ahead by D bits, modulo the polynomial of the CRC, if its low half is multiplied by x^(D+31) and its high half by x^(D-33).
DATA ahead2048<>+0(SB)/8, $0xdcb17aa4
DATA ahead2048<>+8(SB)/8, $0xb9e02b86
GLOBL ahead2048<>(SB), RODATA|NOPTR, $16

DATA ahead512<>+0(SB)/8, $0x740eef02
DATA ahead512<>+8(SB)/8, $0x9e4addf8
GLOBL ahead512<>(SB), RODATA|NOPTR, $16

DATA ahead128<>+0(SB)/8, $0xf20c0dfe
DATA ahead128<>+8(SB)/8, $0x493c7d27
GLOBL ahead128<>(SB), RODATA|NOPTR, $16

// AHEAD512 moves the polynomials of a ahead by factors, and adds them to those of b.
#define AHEAD512(factors, a, b) \
	VPCLMULQDQ $0x00, factors, a, Z6 \
	VPCLMULQDQ $0x11, factors, a, a  \
	VPTERNLOGQ $0x96, Z6, a, b

// AHEAD128 does the same for one polynomial.
#define AHEAD128(factors, a, b) \
	VPCLMULQDQ $0x00, factors, a, X6 \
	VPCLMULQDQ $0x11, factors, a, a  \
	VPXOR      X6, b, b              \
	VPXOR      a, b, b

// func fold(crc uint32, p *byte, n int) uint32
TEXT ·fold(SB), NOSPLIT, $0-28
	MOVL crc+0(FP), AX
	MOVQ p+8(FP), SI
	MOVQ n+16(FP), CX

	VMOVD     AX, X4
	VMOVDQU64 (SI), Z0
	VMOVDQU64 64(SI), Z1
	VMOVDQU64 128(SI), Z2
	VMOVDQU64 192(SI), Z3
	VPXORQ    Z4, Z0, Z0
	VBROADCASTI32X4 ahead2048<>(SB), Z5
	JMP       check

block:
	VPCLMULQDQ $0x00, Z5, Z0, Z6
	VPCLMULQDQ $0x00, Z5, Z1, Z7
	VPCLMULQDQ $0x00, Z5, Z2, Z8
	VPCLMULQDQ $0x00, Z5, Z3, Z9
	VPCLMULQDQ $0x11, Z5, Z0, Z0
	VPCLMULQDQ $0x11, Z5, Z1, Z1
	VPCLMULQDQ $0x11, Z5, Z2, Z2
	VPCLMULQDQ $0x11, Z5, Z3, Z3
	VPTERNLOGQ $0x96, (SI), Z6, Z0
	VPTERNLOGQ $0x96, 64(SI), Z7, Z1
	VPTERNLOGQ $0x96, 128(SI), Z8, Z2
	VPTERNLOGQ $0x96, 192(SI), Z9, Z3

check:
	ADDQ $256, SI
	SUBQ $256, CX
	JNZ  block

	VBROADCASTI32X4 ahead512<>(SB), Z5
	AHEAD512(Z5, Z0, Z1)
	AHEAD512(Z5, Z1, Z2)
	AHEAD512(Z5, Z2, Z3)

	VMOVDQU       ahead128<>(SB), X5
	VEXTRACTI32X4 $1, Z3, X1
	VEXTRACTI32X4 $2, Z3, X2
	VEXTRACTI32X4 $3, Z3, X4
	AHEAD128(X5, X3, X1)
	AHEAD128(X5, X1, X2)
	AHEAD128(X5, X2, X4)

	// What is left of 128 bits is the data of a CRC that starts as 0.
	VMOVQ   X4, DX
	VPEXTRQ $1, X4, BX
	XORL    AX, AX
	CRC32Q  DX, AX
	CRC32Q  BX, AX
	VZEROUPPER
	MOVL    AX, ret+24(FP)
	RET
