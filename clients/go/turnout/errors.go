package turnout

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	bufferv1 "github.com/turnout-rl/turnout/clients/go/gen/turnout/buffer/v1"
)

const domain = "turnout"

// Error is a call, or one item of a batch, that was refused.
type Error struct {
	// Code is the canonical gRPC code.
	Code codes.Code
	// Reason is the UPPER_SNAKE reason; empty if a service did not answer.
	Reason string
	// Message is one sentence for a person.
	Message string
	// Metadata names offending fields and values.
	Metadata map[string]string
	// RetryAfter is when the service wants to be asked again; 0 if it did not say.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s / %s: %s", e.Code, e.Reason, e.Message)
}

// Retryable tells whether the same call may be repeated: the service is away, starting or draining.
func (e *Error) Retryable() bool { return e.Code == codes.Unavailable }

// FromError reads a gRPC error with its details; nil stays nil, and an *Error stays itself.
func FromError(err error) error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return &Error{Code: codes.DeadlineExceeded, Message: err.Error()}
	}
	from := status.Convert(err)
	made := &Error{Code: from.Code(), Message: from.Message()}
	for _, detail := range from.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.Domain == domain {
				made.Reason, made.Metadata = detail.Reason, detail.Metadata
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			made.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return made
}

// ItemError returns the error of one item of a batch, or nil if it was taken.
func ItemError(outcome *bufferv1.ItemOutcome) error {
	if codes.Code(outcome.GetCode()) == codes.OK {
		return nil
	}
	return &Error{
		Code:     codes.Code(outcome.GetCode()),
		Reason:   outcome.GetReason(),
		Message:  outcome.GetMessage(),
		Metadata: outcome.GetMetadata(),
	}
}

func retryable(err error) bool {
	var known *Error
	return errors.As(err, &known) && known.Retryable()
}
