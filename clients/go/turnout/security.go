package turnout

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

// Security is how a client shows who it is, and knows whom it talks to. Files are PEM. With nothing of TLS given,
// connections are plain; to Unix sockets they always are.
type Security struct {
	// CA vouches for the servers; "system" stands for the authorities of this machine.
	CA string
	// Cert and Key are the client's own, for mutual TLS.
	Cert, Key string
	// ServerName is the name that the server's certificate must bear, if it is not the host of the target.
	ServerName string
	// Token says what the client may do; TokenFile holds it instead, and is read at every call.
	Token, TokenFile string
	// Insecure lets the token travel without TLS to other machines.
	Insecure bool
}

// SecurityFromEnvironment reads TURNOUT_CA, _CERT, _KEY, _SERVER_NAME, _TOKEN, _TOKEN_FILE and _INSECURE.
func SecurityFromEnvironment() Security {
	get := func(name string) string { return os.Getenv("TURNOUT_" + name) }
	insecure := false
	switch strings.ToLower(get("INSECURE")) {
	case "1", "true", "yes", "on":
		insecure = true
	}
	return Security{
		CA: get("CA"), Cert: get("CERT"), Key: get("KEY"), ServerName: get("SERVER_NAME"),
		Token: get("TOKEN"), TokenFile: get("TOKEN_FILE"), Insecure: insecure,
	}
}

// options are those of a connection to target. It is an error to send a token to another machine in the open.
func (s Security) options(target string) ([]grpc.DialOption, error) {
	secure := (s.CA != "" || s.Cert != "" || s.ServerName != "") && !isUnix(target)
	tokened := s.Token != "" || s.TokenFile != ""
	if (s.Cert == "") != (s.Key == "") {
		return nil, fmt.Errorf("a client certificate needs both cert and key")
	}
	if s.Token != "" && s.TokenFile != "" {
		return nil, fmt.Errorf("give a token or a token file, not both")
	}
	if tokened && !secure && !s.Insecure && !isLocal(target) {
		return nil, fmt.Errorf("a token is not sent to %s without TLS: give the authority of its certificate (TURNOUT_CA)", target)
	}
	options := []grpc.DialOption{grpc.WithInsecure()}
	if secure {
		config, err := s.tls()
		if err != nil {
			return nil, err
		}
		options = []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}
	}
	if tokened {
		options = append(options, grpc.WithPerRPCCredentials(bearer{s}))
	}
	return options, nil
}

func (s Security) tls() (*tls.Config, error) {
	config := &tls.Config{ServerName: s.ServerName, MinVersion: tls.VersionTLS12}
	if s.CA != "" && s.CA != "system" {
		pem, err := os.ReadFile(s.CA)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificates", s.CA)
		}
	}
	if s.Cert != "" || s.Key != "" {
		// Read at every handshake, so that a renewed pair needs no restart.
		if _, err := tls.LoadX509KeyPair(s.Cert, s.Key); err != nil {
			return nil, err
		}
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(s.Cert, s.Key)
			return &pair, err
		}
	}
	return config, nil
}

// bearer puts the token on every call.
type bearer struct{ security Security }

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token := b.security.Token
	if token == "" {
		read, err := os.ReadFile(b.security.TokenFile)
		if err != nil {
			return nil, status.Error(codes.Unauthenticated, "the token file cannot be read: "+err.Error())
		}
		token = strings.TrimSpace(string(read))
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity is false: Security has looked at the target already.
func (b bearer) RequireTransportSecurity() bool { return false }

func isUnix(target string) bool {
	return strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "unix-abstract:")
}

func isLocal(target string) bool {
	if isUnix(target) {
		return true
	}
	host, _, err := net.SplitHostPort(target[strings.LastIndex(target, "/")+1:])
	if err != nil {
		return false
	}
	address := net.ParseIP(host)
	return host == "localhost" || (address != nil && address.IsLoopback())
}
