#include "turnout/error.h"

#include <utility>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace turnout {

namespace {

constexpr char kDomain[] = "turnout";

std::string sentence(const std::string& reason, const std::string& message) {
  return reason.empty() ? message : reason + ": " + message;
}

}  // namespace

Error::Error(grpc::StatusCode code_, std::string reason_, const std::string& message,
             std::map<std::string, std::string> metadata_, std::optional<std::chrono::nanoseconds> retry_after_)
    : std::runtime_error(sentence(reason_, message)),
      code(code_),
      reason(std::move(reason_)),
      metadata(std::move(metadata_)),
      retry_after(retry_after_) {}

void check(const grpc::Status& status) {
  if (status.ok()) return;
  std::string reason;
  std::map<std::string, std::string> metadata;
  std::optional<std::chrono::nanoseconds> retry_after;
  google::rpc::Status details;
  if (details.ParseFromString(status.error_details())) {
    for (const auto& detail : details.details()) {
      google::rpc::ErrorInfo info;
      google::rpc::RetryInfo retry;
      if (detail.UnpackTo(&info) && info.domain() == kDomain) {
        reason = info.reason();
        metadata.insert(info.metadata().begin(), info.metadata().end());
      } else if (detail.UnpackTo(&retry)) {
        retry_after = std::chrono::seconds(retry.retry_delay().seconds()) +
                      std::chrono::nanoseconds(retry.retry_delay().nanos());
      }
    }
  }
  throw Error(status.error_code(), std::move(reason), status.error_message(), std::move(metadata), retry_after);
}

void check(const buffer::v1::ItemOutcome& outcome) {
  if (outcome.code() == grpc::StatusCode::OK) return;
  throw Error(static_cast<grpc::StatusCode>(outcome.code()), outcome.reason(), outcome.message(),
              {outcome.metadata().begin(), outcome.metadata().end()});
}

}  // namespace turnout
