// Package testtls is for tests of TLS: who signs certificates, servers that have them, and passwords that servers ask for.
package testtls

import (
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
	File  string
	Until time.Time // how long certificates last that it signs from now on

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes one, of which nobody else knows.
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
	a := &Authority{cert: cert, key: key, Until: time.Now().Add(time.Hour), File: filepath.Join(t.TempDir(), name+".pem")}
	require.NoError(t, os.WriteFile(a.File, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	return a
}

// Sign returns the certificate of a server at this address, and its key.
func (a *Authority) Sign(t testing.TB, address string) (cert, key []byte) {
	t.Helper()
	secret, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: address}, NotBefore: time.Now().Add(-time.Hour), NotAfter: a.Until,
		IPAddresses: []net.IP{net.ParseIP(address)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &secret.PublicKey, a.key)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(secret)
	require.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// URL is that of a superuser of the server, who asks for TLS in a mode such as verify-full, and knows the authority.
func (a *Authority) URL(s *devpg.Server, mode string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=%s&sslrootcert=%s", s.Port(), mode, url.QueryEscape(a.File))
}

// Serve has a server of one's own speak TLS, with a certificate for this address. It is restarted.
func (a *Authority) Serve(t testing.TB, s *devpg.Server, address string) {
	t.Helper()
	cert, key := a.Sign(t, address)
	write(t, s, "server.crt", string(cert))
	write(t, s, "server.key", string(key))
	exec(t, s, `COPY (SELECT 1) TO PROGRAM 'cat >/dev/null; chmod 600 `+filepath.Join(s.DataDir(), "server.key")+`'`)
	exec(t, s, `ALTER SYSTEM SET ssl = on`)
	require.NoError(t, s.Restart(t.Context(), devpg.Fast))
}

// AskForPassword has a server of one's own ask a role for its password, as servers do that are not for tests.
func AskForPassword(t testing.TB, s *devpg.Server, role string) {
	t.Helper()
	write(t, s, "pg_hba.conf", "host all "+role+" all scram-sha-256\nlocal all all trust\nhost all all all trust\n")
	exec(t, s, `SELECT pg_reload_conf()`)
}

// write writes a file of the server, whose account may be another, by the server.
func write(t testing.TB, s *devpg.Server, name, content string) {
	t.Helper()
	exec(t, s, `COPY (SELECT line FROM unnest(string_to_array($$`+content+`$$, E'\n')) WITH ORDINALITY AS l (line, n) WHERE line <> '' ORDER BY n) TO '`+filepath.Join(s.DataDir(), name)+`'`)
}

func exec(t testing.TB, s *devpg.Server, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.URL)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), sql)
	require.NoError(t, err)
}
