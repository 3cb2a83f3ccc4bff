// Errors of calls, with the reason and metadata that every Turnout service gives.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include <grpcpp/grpcpp.h>

#include "turnout/buffer/v1/buffer.pb.h"

namespace turnout {

// A call, or one item of a batch, that was refused.
class Error : public std::runtime_error {
 public:
  Error(grpc::StatusCode code, std::string reason, const std::string& message,
        std::map<std::string, std::string> metadata = {},
        std::optional<std::chrono::nanoseconds> retry_after = std::nullopt);

  // The canonical gRPC code.
  const grpc::StatusCode code;
  // The UPPER_SNAKE reason (google.rpc.ErrorInfo); empty if no service answered.
  const std::string reason;
  // Offending fields and values.
  const std::map<std::string, std::string> metadata;
  // When the service wants to be asked again, if it said so.
  const std::optional<std::chrono::nanoseconds> retry_after;

  // Whether the same call may be repeated: the service is away, starting or draining.
  bool retryable() const { return code == grpc::StatusCode::UNAVAILABLE; }
};

// Throws Error unless the call was OK.
void check(const grpc::Status& status);
// Throws Error unless the item was taken.
void check(const buffer::v1::ItemOutcome& outcome);

}  // namespace turnout
