#include <cstdint>
#include <limits>
#include <string>

#include <google/protobuf/util/json_util.h>

#include "smoke/smoke.h"

namespace smoke {

using namespace turnout::buffer::v1;

namespace {

void numbers() {
  for (const int64_t number : {int64_t{0}, int64_t{-1}, int64_t{1} << 31, int64_t{1} << 53, (int64_t{1} << 53) + 1,
                               std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    Segment segment, from_wire, from_text;
    segment.set_tokens(number);
    segment.set_weight_version(number);
    std::string text;
    expect(google::protobuf::util::MessageToJsonString(segment, &text).ok(), "no JSON of " + std::to_string(number));
    expect(google::protobuf::util::JsonStringToMessage(text, &from_text).ok(), "JSON not read: " + text);
    expect(from_wire.ParseFromString(segment.SerializeAsString()), "wire not read");
    for (const Segment& back : {from_wire, from_text}) {
      expect(back.tokens() == number && back.has_weight_version() && back.weight_version() == number,
             std::to_string(number) + " came back as " + std::to_string(back.tokens()));
    }
  }
  Segment absent;
  expect(!absent.has_weight_version(), "an absent version is there");
}

void newer_service() {
  ListGroupsRequest request, back;
  request.add_states(static_cast<GroupState>(99));
  expect(back.ParseFromString(request.SerializeAsString()) && back.states(0) == 99, "an unknown enum value was lost");
  expect(!GroupState_IsValid(back.states(0)), "99 has become a state: use another number here");
  WaitForSampleableResponse event;
  expect(event.ParseFromString(std::string("\x7a\x01\x61")), "an unknown event was not read");
  expect(event.event_case() == WaitForSampleableResponse::EVENT_NOT_SET, "an unknown event is set");
}

}  // namespace

void values() {
  numbers();
  newer_service();
}

}  // namespace smoke
