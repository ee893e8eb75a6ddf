package pgwake_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgwake/pgwake"
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
)

// This file answers: does everything go by TLS that is told to?

// authority is who signs certificates, with its own in a file.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &authority{cert: cert, key: key, file: filepath.Join(t.TempDir(), name+".pem")}
	require.NoError(t, os.WriteFile(a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return a
}

// sign returns the certificate of a server at this address, and its key.
func (a *authority) sign(t *testing.T, address string) (cert, key []byte) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: address}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.ParseIP(address)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &secret.PublicKey, a.key)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(secret)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

func TestOpen_VerifyFull_EverythingGoesByTLS_AndNothingWithoutIt(t *testing.T) {
	t.Parallel()
	server, err := devpg.Start(t.Context(), &devpg.Options{IgnoreURL: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop(context.Background())) })
	ours, others := newAuthority(t, "ours"), newAuthority(t, "others")
	withCertificate := func(address string) {
		cert, key := ours.sign(t, address)
		admin, err := pgx.Connect(t.Context(), server.URL)
		require.NoError(t, err)
		defer admin.Close(t.Context())
		// The server, whose account may be another, writes its own files.
		for name, content := range map[string][]byte{"server.crt": cert, "server.key": key} {
			file := filepath.Join(server.DataDir(), name)
			_, err = admin.Exec(t.Context(), `COPY (SELECT line FROM unnest(string_to_array($$`+string(content)+`$$, E'\n')) WITH ORDINALITY AS l (line, n) WHERE line <> '' ORDER BY n) TO '`+file+`'`)
			require.NoError(t, err)
		}
		_, err = admin.Exec(t.Context(), `COPY (SELECT 1) TO PROGRAM 'chmod 600 `+filepath.Join(server.DataDir(), "server.key")+`'`)
		require.NoError(t, err)
		_, err = admin.Exec(t.Context(), `ALTER SYSTEM SET ssl = on`)
		require.NoError(t, err)
		require.NoError(t, server.Restart(t.Context(), devpg.Fast))
	}
	withCertificate("127.0.0.1")
	at := func(mode string, ca *authority) string {
		return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=%s&sslrootcert=%s", server.Port(), mode, url.QueryEscape(ca.file))
	}

	p, err := pgwake.Open(t.Context(), at("verify-full", ours), &pgwake.Config{Logger: silent})
	require.NoError(t, err)
	require.True(t, p.Health().OK, p.Health().Problems)
	require.True(t, p.Stats().Listening)
	_, err = p.EnqueueForWorker(t.Context(), pgwake.WorkItem{Name: "w"}, nil)
	require.NoError(t, err)
	_, err = p.FetchWorkItem(t.Context(), soon)
	require.NoError(t, err)
	rows, err := p.Pool().Query(t.Context(), `SELECT a.application_name || ' ' || s.ssl FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.backend_type = 'client backend' GROUP BY 1 ORDER BY 1`)
	require.NoError(t, err)
	sessions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{" true", "pgwake listen true"}, sessions, "the pool, and LISTEN")
	require.NoError(t, p.Close(t.Context()))

	refused := func(mode string, ca *authority) {
		t.Helper()
		p, err := pgwake.Open(t.Context(), at(mode, ca), &pgwake.Config{Logger: silent})
		require.Nil(t, p)
		var typed *pgwake.Error
		require.ErrorAs(t, err, &typed)
		require.ErrorContains(t, err, "x509: certificate")
		require.False(t, typed.Retryable, "%v", err)
	}
	refused("verify-full", others)
	refused("verify-ca", others)
	withCertificate("127.0.0.2")
	refused("verify-full", ours)
	// Of the authority, and so enough for who does not ask for the host.
	p, err = pgwake.Open(t.Context(), at("verify-ca", ours), &pgwake.Config{Logger: silent})
	require.NoError(t, err)
	require.NoError(t, p.Close(t.Context()))

	admin, err := pgx.Connect(t.Context(), server.URL)
	require.NoError(t, err)
	_, err = admin.Exec(t.Context(), `ALTER SYSTEM SET ssl = off`)
	require.NoError(t, err)
	require.NoError(t, admin.Close(t.Context()))
	require.NoError(t, server.Restart(t.Context(), devpg.Fast))
	_, err = pgwake.Open(t.Context(), at("verify-full", ours), &pgwake.Config{Logger: silent})
	require.ErrorContains(t, err, "TLS", "it does not go on without")
}
