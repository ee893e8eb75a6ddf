// Package testtls answers: where do tests have certificates from, right ones and wrong ones?
package testtls

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
	"github.com/pgwake/pgwake/internal/devpg"
	"github.com/stretchr/testify/require"
)

// Authority is who signs certificates, with its own in a file.
type Authority struct {
	File string

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New returns another one.
func New(t testing.TB, name string) *Authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	a := &Authority{cert: cert, key: key, File: filepath.Join(t.TempDir(), name+".pem")}
	require.NoError(t, os.WriteFile(a.File, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return a
}

// Sign returns the certificate of a server at an address, and its key.
func (a *Authority) Sign(t testing.TB, address string) (cert, key []byte) {
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

// Serve has a PostgreSQL accept TLS, as a server at that address.
func (a *Authority) Serve(t testing.TB, server *devpg.Server, address string) {
	t.Helper()
	cert, key := a.Sign(t, address)
	ctx := context.Background()
	admin, err := pgx.Connect(ctx, server.URL)
	require.NoError(t, err)
	defer admin.Close(ctx)
	// The server, whose account may be another, writes its own files.
	for name, content := range map[string][]byte{"server.crt": cert, "server.key": key} {
		file := filepath.Join(server.DataDir(), name)
		_, err = admin.Exec(ctx, `COPY (SELECT line FROM unnest(string_to_array($$`+string(content)+`$$, E'\n')) WITH ORDINALITY AS l (line, n) WHERE line <> '' ORDER BY n) TO '`+file+`'`)
		require.NoError(t, err)
	}
	_, err = admin.Exec(ctx, `COPY (SELECT 1) TO PROGRAM 'chmod 600 `+filepath.Join(server.DataDir(), "server.key")+`'`)
	require.NoError(t, err)
	_, err = admin.Exec(ctx, `ALTER SYSTEM SET ssl = on`)
	require.NoError(t, err)
	require.NoError(t, server.Restart(ctx, devpg.Fast))
}

// URL is that of a PostgreSQL, for clients that trust this authority as far as a mode of libpq says, such as verify-full.
func (a *Authority) URL(server *devpg.Server, mode string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=%s&sslrootcert=%s", server.Port(), mode, url.QueryEscape(a.File))
}
