package amqp_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/url"
	"os"
	"sync"
	"testing"

	"github.com/pgwake/pgwake/internal/testtls"
	"github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
)

// This file answers: does a Stream speak to the broker that it was told to, and to nobody else?

// standIn listens as a broker would, with a certificate or without TLS if that is nil, and tells what the first who connects says first.
func standIn(t *testing.T, certificate *tls.Certificate) (address string, said <-chan string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	heard := make(chan string, 1)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if certificate != nil {
				conn = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{*certificate}})
			}
			first := make([]byte, 4)
			n, _ := io.ReadFull(conn, first)
			_ = conn.Close()
			select {
			case heard <- string(first[:n]):
			default: // who comes again
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return l.Addr().String(), heard
}

func TestConnect_TLS_OnlyToTheBrokerOfTheAuthority(t *testing.T) {
	ours, others := testtls.New(t, "ours"), testtls.New(t, "others")
	certificate := func(a *testtls.Authority, address string) *tls.Certificate {
		c, err := tls.X509KeyPair(a.Sign(t, address))
		require.NoError(t, err)
		return &c
	}
	trusted, err := os.ReadFile(ours.File)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(trusted))
	for way, c := range map[string]struct {
		query      url.Values
		connection amqp091.Config
	}{
		"by the URL":    {query: url.Values{"cacertfile": {ours.File}}},
		"by the Config": {connection: amqp091.Config{TLSClientConfig: &tls.Config{RootCAs: pool}}},
		"after a Dial":  {connection: amqp091.Config{TLSClientConfig: &tls.Config{RootCAs: pool}, Dial: net.Dial}},
	} {
		for what, server := range map[string]struct {
			certificate *tls.Certificate
			hears, says string
		}{
			"right":                {certificate(ours, "127.0.0.1"), "AMQP", ""},
			"of another authority": {certificate(others, "127.0.0.1"), "", "x509: certificate signed by unknown authority"},
			"of another host":      {certificate(ours, "127.0.0.2"), "", "x509: certificate is valid for 127.0.0.2, not 127.0.0.1"},
			"without TLS":          {nil, "\x16\x03\x01", ""}, // of a TLS handshake, and nothing else is said
		} {
			t.Run(way+"/"+what, func(t *testing.T) {
				address, said := standIn(t, server.certificate)
				s := open(t, "amqps://user:password@"+address+"/?"+c.query.Encode(), c.connection)
				err := s.Declare(t.Context(), "a")
				require.ErrorContains(t, err, server.says)
				require.NotContains(t, err.Error(), "password")
				first := <-said
				require.Equal(t, server.hears, first[:min(len(first), max(len(server.hears), 1))])
			})
		}
	}
}
