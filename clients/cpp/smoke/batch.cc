#include <chrono>
#include <future>
#include <string>
#include <vector>

#include <google/protobuf/util/json_util.h>

#include "smoke/smoke.h"
#include "turnout/error.h"

namespace smoke {

using namespace turnout::buffer::v1;
using turnout::check;

namespace {

constexpr char kPartition[] = "train";
constexpr int kGroups = 4;
constexpr int kGroupSize = 2;
constexpr int64_t kStep = (int64_t{1} << 53) + 1;  // a double would lose it

// gRPC sets no deadline by itself, and a call without one may last for ever.
struct Context : grpc::ClientContext {
  explicit Context(std::chrono::seconds timeout = std::chrono::seconds(30)) {
    set_deadline(std::chrono::system_clock::now() + timeout);
  }
};

std::string payload_of(const std::string& group, int index) {
  return "tokens of " + group + "/" + std::to_string(index) + std::string(1, '\0') + std::string(1000, 'x');
}

void add(Buffer& buffer, const std::string& run) {
  AddGroupsRequest request;
  request.set_run_id(run);
  request.set_partition(kPartition);
  request.set_step(kStep);
  request.set_request_id("add");
  for (int at = 0; at < kGroups; ++at) {
    GroupSpec* group = request.add_groups();
    group->set_group_id("g" + std::to_string(at));
    group->set_group_size(kGroupSize);
    group->mutable_prompt()->set_inline_("prompt " + std::to_string(at));
  }
  for (int repeated = 0; repeated < 2; ++repeated) {  // the same request_id: added once
    Context context;
    AddGroupsResponse response;
    check(buffer.AddGroups(&context, request, &response));
    expect(response.added() == kGroups, "a repeated AddGroups gave another answer");
  }
}

// A rollout worker: claims everything and hands it in over one stream.
void work(Buffer& buffer, const std::string& run) {
  ClaimGroupsRequest claim;
  claim.set_run_id(run);
  claim.set_partition(kPartition);
  claim.set_worker_id("smoke");
  claim.set_max_trajectories(kGroups * kGroupSize);
  claim.mutable_max_wait()->set_seconds(10);
  ClaimGroupsResponse claimed;
  Context claiming;
  check(buffer.ClaimGroups(&claiming, claim, &claimed));

  Context context;
  const auto stream = buffer.FinishStream(&context);
  FinishStreamRequest frame;
  frame.mutable_header()->set_run_id(run);
  frame.mutable_header()->set_partition(kPartition);
  expect(stream->Write(frame), "the stream broke at its header");
  int64_t sequence = 0;
  for (const Claim& one : claimed.claims()) {
    frame.Clear();
    frame.mutable_batch()->set_sequence(++sequence);
    for (const ClaimedTrajectory& trajectory : one.trajectories()) {
      TrajectoryResult* result = frame.mutable_batch()->add_results();
      *result->mutable_token() = one.token();
      result->set_group_id(one.group_id());
      result->set_index(trajectory.index());
      Output* output = result->add_outputs();
      output->add_segments()->set_tokens(5);
      (*output->mutable_rewards())["reward"] = 0.5;
      output->mutable_payload()->set_inline_(payload_of(one.group_id(), trajectory.index()));
    }
    expect(stream->Write(frame), "the stream broke");
    FinishStreamResponse answer;
    expect(stream->Read(&answer) && answer.sequence() == sequence, "a batch was not answered");
    for (const ItemOutcome& outcome : answer.outcomes()) check(outcome);
  }
  stream->WritesDone();
  check(stream->Finish());
}

void wait_for(Buffer& buffer, const std::string& run, int64_t target, WaitOutcome wanted, int seconds) {
  WaitForSampleableRequest request;
  request.set_run_id(run);
  request.set_partition(kPartition);
  request.set_step(kStep);
  request.set_target(target);
  request.mutable_max_wait()->set_seconds(seconds);
  Context context(std::chrono::seconds(seconds + 5));
  const auto stream = buffer.WaitForSampleable(&context, request);
  WaitForSampleableResponse event;
  bool done = false;
  while (stream->Read(&event)) {
    if (!event.has_done()) continue;  // progress, or an event of a newer service
    done = true;
    expect(event.done().outcome() == wanted, "the wait ended " + WaitOutcome_Name(event.done().outcome()));
  }
  check(stream->Finish());
  expect(done, "the wait ended without its final event");
}

// Downloads the payloads of a sampled batch, in the order of their references.
std::vector<std::string> download(Buffer& buffer, const std::string& run, const std::string& lease,
                                  const std::vector<PayloadRef>& refs) {
  GetPayloadsRequest request;
  request.set_run_id(run);
  request.set_lease_id(lease);
  *request.mutable_refs() = {refs.begin(), refs.end()};
  Context context;
  const auto stream = buffer.GetPayloads(&context, request);
  GetPayloadsResponse frame;
  std::vector<std::string> payloads;
  while (stream->Read(&frame)) {
    if (frame.has_header()) payloads.emplace_back();
    if (!frame.chunk().empty()) payloads.back() += frame.chunk();
  }
  check(stream->Finish());
  return payloads;
}

std::string sample(Buffer& buffer, const std::string& run) {
  SampleRequest request;
  request.set_run_id(run);
  request.set_partition(kPartition);
  request.set_step(kStep);
  request.set_batch(kGroups);
  request.mutable_max_wait()->set_seconds(10);
  Context context;
  const auto stream = buffer.Sample(&context, request);
  SampleResponse event;
  std::string lease;
  std::vector<PayloadRef> refs;
  std::vector<std::string> wanted;
  while (stream->Read(&event)) {
    for (const SampledGroup& group : event.groups().groups()) {
      expect(group.born_step() == kStep, "a step above 2**53 was rounded");
      for (const SampledTrajectory& trajectory : group.trajectories()) {
        refs.push_back(trajectory.outputs(0).payload().ref());
        wanted.push_back(payload_of(group.group_id(), trajectory.index()));
      }
    }
    if (event.has_done()) lease = event.done().lease_id();
  }
  check(stream->Finish());
  expect(!lease.empty() && refs.size() == kGroups * kGroupSize, std::to_string(refs.size()) + " were sampled");
  expect(download(buffer, run, lease, refs) == wanted, "payloads came back changed");
  return lease;
}

}  // namespace

void refusals(Buffer& buffer, const std::string& run) {
  try {
    Context context;
    GetRunRequest request;
    GetRunResponse response;
    request.set_run_id("no such run");
    check(buffer.GetRun(&context, request, &response));
    expect(false, "an unknown run was found");
  } catch (const turnout::Error& error) {
    expect(error.code == grpc::StatusCode::NOT_FOUND && error.reason == "RUN_NOT_FOUND" && !error.retryable(),
           std::string("an unknown run was refused with ") + error.what());
  }
  try {
    Context context;
    AddGroupsRequest request;
    AddGroupsResponse response;
    request.set_run_id(run);
    request.set_partition(kPartition);
    request.set_epoch(7);
    request.add_groups()->set_group_id("x");
    check(buffer.AddGroups(&context, request, &response));
    expect(false, "an epoch that was never opened was taken");
  } catch (const turnout::Error& error) {
    expect(error.reason == "UNKNOWN_EPOCH" && !error.metadata.empty(),
           std::string("an epoch that was never opened was refused with ") + error.what());
  }
  wait_for(buffer, run, 1, WAIT_OUTCOME_TIMED_OUT, 0);
}

std::string batch(Buffer& buffer, const std::string& run) {
  add(buffer, run);
  auto worker = std::async(std::launch::async, [&] { work(buffer, run); });
  wait_for(buffer, run, kGroups, WAIT_OUTCOME_REACHED, 20);
  worker.get();
  const std::string lease = sample(buffer, run);
  {
    Context context;
    CommitSampleRequest request;
    CommitSampleResponse response;
    request.set_run_id(run);
    request.set_lease_id(lease);
    check(buffer.CommitSample(&context, request, &response));
  }
  Context context;
  GetLedgerRequest request;
  GetLedgerResponse ledger;
  request.set_run_id(run);
  request.set_partition(kPartition);
  check(buffer.GetLedger(&context, request, &ledger));
  std::string text;
  expect(google::protobuf::util::MessageToJsonString(ledger, &text).ok(), "no JSON of the ledger");
  return text;
}

}  // namespace smoke
