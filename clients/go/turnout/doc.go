// Package turnout holds what a caller of Turnout's services needs beside the generated code in gen/: connections, errors
// with their reasons, waits that outlive a restart, and payload bytes.
package turnout
