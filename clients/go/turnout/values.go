package turnout

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// Tokens is the content type of token ids: little-endian int32.
const Tokens = "application/x-turnout-int32"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC32C returns the checksum that payloads and weights carry.
func CRC32C(data []byte) uint32 { return crc32.Checksum(data, castagnoli) }

// PackTokens returns token ids as payload bytes.
func PackTokens(ids []int32) []byte {
	data := make([]byte, 4*len(ids))
	for at, id := range ids {
		binary.LittleEndian.PutUint32(data[4*at:], uint32(id))
	}
	return data
}

// UnpackTokens returns the token ids of payload bytes.
func UnpackTokens(data []byte) ([]int32, error) {
	if len(data)%4 != 0 {
		return nil, fmt.Errorf("%d bytes are no int32 token ids", len(data))
	}
	ids := make([]int32, len(data)/4)
	for at := range ids {
		ids[at] = int32(binary.LittleEndian.Uint32(data[4*at:]))
	}
	return ids, nil
}
