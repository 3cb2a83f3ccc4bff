// A smoke program against a live replay buffer: smoke TARGET RUN. Prints the ledger of the run as JSON.
#include <exception>
#include <iostream>
#include <string>

#include <grpcpp/grpcpp.h>

#include "smoke/smoke.h"
#include "turnout/error.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: smoke TARGET RUN\n  TARGET  address of a replay buffer, host:port\n  RUN     id of a run to create\n";
    return 2;
  }
  const std::string run = argv[2];
  try {
    smoke::values();
    const auto channel = grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials());
    const auto buffer = turnout::buffer::v1::ReplayBuffer::NewStub(channel);
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    turnout::buffer::v1::CreateRunRequest request;
    turnout::buffer::v1::CreateRunResponse response;
    request.set_run_id(run);
    turnout::check(buffer->CreateRun(&context, request, &response));
    smoke::refusals(*buffer, run);
    std::cout << smoke::batch(*buffer, run) << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "smoke: " << error.what() << std::endl;
    return 1;
  }
}
