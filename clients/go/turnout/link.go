package turnout

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

const (
	// attemptTime is the deadline of one attempt of a unary call.
	attemptTime = 30 * time.Second
	// totalTime is for all attempts together, unless the context ends first.
	totalTime = 60 * time.Second

	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second

	maxMessageBytes = 64 << 20
)

// Dial opens a connection to one service, with TLS and a token as the environment says (see Security). It does not wait
// for it: calls do.
func Dial(target string) (*grpc.ClientConn, error) {
	return DialWith(target, SecurityFromEnvironment())
}

// DialWith is Dial with TLS and a token as given.
func DialWith(target string, security Security) (*grpc.ClientConn, error) {
	secured, err := security.options(target)
	if err != nil {
		return nil, err
	}
	return grpc.Dial(target, append(secured,
		grpc.WithNoProxy(),
		// A half-open peer is noticed soon, and no proxy cuts a silent wait; grpc-go pings every 10 s at the most.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestPause},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
	)...)
}

// Call makes a unary call with a deadline, and repeats it while the service is UNAVAILABLE: with the same request, so
// with the same request_id. The error is an *Error.
func Call[Req, Res any](
	ctx context.Context,
	method func(context.Context, Req, ...grpc.CallOption) (Res, error),
	request Req,
) (Res, error) {
	ctx, cancel := context.WithTimeout(ctx, totalTime)
	defer cancel()
	pause := firstPause
	for {
		attempt, done := context.WithTimeout(ctx, attemptTime)
		answer, err := method(attempt, request)
		done()
		if err = FromError(err); err == nil || !retryable(err) {
			return answer, err
		}
		var refused *Error
		wait := pause
		if errors.As(err, &refused) && refused.RetryAfter > wait {
			wait = refused.RetryAfter
		}
		if !Sleep(ctx, wait) {
			return answer, err
		}
		if pause *= 2; pause > longestPause {
			pause = longestPause
		}
	}
}

// Sleep waits, and tells whether the context still lives.
func Sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
