// For users with a module proxy. The repository itself is built and tested in GOPATH mode against Debian's packages
// (see README.md): this file and its versions are not exercised by the tests.
module github.com/turnout-rl/turnout/clients/go

go 1.19

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20240318140521-94a12d6c2237
	google.golang.org/grpc v1.64.0
	google.golang.org/protobuf v1.33.0
)
