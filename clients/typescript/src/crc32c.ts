/** CRC32C (Castagnoli, RFC 3720 appendix B.4) of bytes, which payloads and weights carry. Pure. */
const POLYNOMIAL = 0x82f63b78;

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ POLYNOMIAL : value >>> 1;
  return value >>> 0;
});

/** Returns the CRC32C of `data`, going on from the CRC of what came before it. */
export function crc32c(data: Uint8Array, before = 0): number {
  let value = ~before;
  for (const byte of data) value = (TABLE[(value ^ byte) & 0xff] as number) ^ (value >>> 8);
  return ~value >>> 0;
}
