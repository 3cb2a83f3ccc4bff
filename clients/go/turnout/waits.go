package turnout

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	// outageTime is how long a service may be away before a wait gives up.
	outageTime = 60 * time.Second
	// graceTime is what a call may last beyond its max_wait.
	graceTime = 5 * time.Second
)

// Receiver is the stream of a wait or watch.
type Receiver[Message any] interface {
	Recv() (Message, error)
}

// Hold runs a wait to its final event, over restarts of the service.
//
// arm opens the stream of an arming, given the time that is left; it carries the same cursor and request_id each time,
// so that nothing is lost or counted twice, and forgets what came of an arming that was cut. handle is given every
// message, and tells whether it was the final one; a message whose event is not set comes from a newer service and is to
// be ignored. The error is an *Error, or what handle returned.
func Hold[Message any, Stream Receiver[Message]](
	ctx context.Context,
	maxWait time.Duration,
	arm func(ctx context.Context, left time.Duration) (Stream, error),
	handle func(Message) (final bool, err error),
) error {
	end := time.Now().Add(maxWait)
	heard := time.Now()
	pause := firstPause
	for {
		left := time.Until(end)
		if left < 0 {
			left = 0
		}
		err := func() error {
			arming, cancel := context.WithTimeout(ctx, left+graceTime)
			defer cancel()
			stream, err := arm(arming, left)
			if err != nil {
				return FromError(err)
			}
			for {
				message, err := stream.Recv()
				if err == io.EOF {
					return &Error{Code: codes.Unavailable, Message: "the stream ended without its final event"}
				}
				if err != nil {
					return FromError(err)
				}
				heard, pause = time.Now(), firstPause
				if final, err := handle(message); final || err != nil {
					return err
				}
			}
		}()
		if err == nil || !retryable(err) || time.Since(heard) > outageTime || time.Now().Add(pause).After(end) {
			return err
		}
		if !Sleep(ctx, pause) {
			return err
		}
		if pause *= 2; pause > longestPause {
			pause = longestPause
		}
	}
}
