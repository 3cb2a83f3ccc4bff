// What the smoke program is made of.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "turnout/buffer/v1/buffer.grpc.pb.h"

namespace smoke {

using Buffer = turnout::buffer::v1::ReplayBuffer::Stub;

// Throws with `what` unless `holds`.
inline void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Numbers at their boundaries, enum values and events of a newer service: on the wire and as JSON, without a service.
void values();

// Deadlines and error details of a live buffer.
void refusals(Buffer& buffer, const std::string& run);

// A whole batch of a live buffer: adds groups, parks a wait, finishes them from a second thread over a stream, samples
// with payload bytes and commits. Returns the ledger as JSON.
std::string batch(Buffer& buffer, const std::string& run);

}  // namespace smoke
