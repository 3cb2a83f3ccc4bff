package turnout

import (
	"strings"
	"testing"
)

// A token that travels in the open is everybody's.
func TestATokenIsNotSentToAnotherMachineInTheOpen(t *testing.T) {
	held := Security{Token: "turnout.w.s3cret"}
	for target, local := range map[string]bool{
		"node-7:50051": false, "10.0.0.1:50051": false, "dns:///node-7:50051": false, "[fd00::1]:50051": false,
		"127.0.0.1:50051": true, "localhost:50051": true, "[::1]:50051": true, "unix:/run/turnout.sock": true,
		"dns:///localhost:50051": true,
	} {
		_, err := held.options(target)
		if (err == nil) != local {
			t.Errorf("%s: %v", target, err)
		}
		if err != nil && strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: the error shows the token", target)
		}
	}
	if _, err := (Security{Token: "x", Insecure: true}).options("node-7:50051"); err != nil {
		t.Error(err)
	}
	if _, err := (Security{Token: "x", CA: "system"}).options("node-7:50051"); err != nil {
		t.Error(err)
	}
}

func TestFilesThatAreMissingAreErrors(t *testing.T) {
	for _, wrong := range []Security{{CA: "/none.pem"}, {Cert: "/none.pem", Key: "/none.key"}, {Key: "/none.key"}, {CA: "/dev/null"}} {
		if _, err := wrong.options("node-7:50051"); err == nil {
			t.Errorf("%+v was taken", wrong)
		}
	}
}
