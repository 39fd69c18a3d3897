//! TLS for HTTP: the daemon has a certificate of its own making, and a client knows it by its
//! fingerprint. A client therefore sends its token to that daemon or to nobody; no authority is
//! trusted, and names do not matter.

use crate::AgentError;
use crate::api::tokens::{hex, same};
use crate::os::disk::{self, Disk};
use crate::paths::Paths;
use ring::digest::{SHA256, digest};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    CryptoProvider, ring as provider, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, ServerConfig,
    SignatureScheme,
};
use std::io;
use std::sync::Arc;

/// Longest file of a certificate or a key.
const LONGEST_FILE: u64 = 64 << 10;

/// SHA-256 of a certificate.
pub(crate) type Fingerprint = [u8; 32];

/// How the daemon proves who it is.
pub(crate) struct Identity {
    pub(crate) config: Arc<ServerConfig>,
    /// The fingerprint of its certificate in hexadecimal.
    pub(crate) fingerprint: String,
}

impl Identity {
    /// The certificate and key of this state, which are made on first use.
    pub(crate) fn of(paths: &Paths, disk: &dyn Disk) -> Result<Self, AgentError> {
        let (certificate, key) = match read(paths, disk) {
            Ok(found) => found,
            Err(e) if e.kind() == io::ErrorKind::NotFound => make(paths, disk)?,
            Err(e) => return Err(AgentError::file("read", &paths.certificate())(e)),
        };
        let fingerprint = hex(&fingerprint(&certificate));
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .and_then(|c| c.with_no_client_auth().with_single_cert(vec![certificate], key));
        let config = config.map_err(|e| unusable(paths, &e.to_string()))?;
        Ok(Self { config: Arc::new(config), fingerprint })
    }
}

fn unusable(paths: &Paths, why: &str) -> AgentError {
    let path = paths.certificate().display().to_string();
    AgentError::refused(
        format!("could not use the certificate {path:?}: {why}"),
        "without the file a new one is made, and clients need its fingerprint",
    )
}

fn read(
    paths: &Paths,
    disk: &dyn Disk,
) -> io::Result<(CertificateDer<'static>, PrivateKeyDer<'static>)> {
    let odd = |e: rustls::pki_types::pem::Error| io::Error::other(e.to_string());
    let certificate = disk.read(&paths.certificate(), LONGEST_FILE)?;
    let key = disk.read(&paths.key(), LONGEST_FILE)?;
    Ok((
        CertificateDer::from_pem_slice(&certificate).map_err(odd)?,
        PrivateKeyDer::from_pem_slice(&key).map_err(odd)?,
    ))
}

/// Makes a certificate for the names of this machine, for clients that check names.
fn make(
    paths: &Paths,
    disk: &dyn Disk,
) -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), AgentError> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(String::from).to_vec();
    names.extend(Some(host.trim().to_string()).filter(|h| !h.is_empty()));
    let made = rcgen::generate_simple_self_signed(names);
    let made = made.map_err(|e| unusable(paths, &e.to_string()))?;
    // The key first: a certificate without it would be taken for whole.
    for (path, text) in
        [(paths.key(), made.signing_key.serialize_pem()), (paths.certificate(), made.cert.pem())]
    {
        let written = disk::replace(disk, &path, text.as_bytes());
        written.map_err(AgentError::file("write", &path))?;
    }
    read(paths, disk).map_err(AgentError::file("read", &paths.certificate()))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(provider::default_provider())
}

fn fingerprint(certificate: &CertificateDer<'_>) -> Fingerprint {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest(&SHA256, certificate).as_ref());
    bytes
}

/// The fingerprint of the certificate in this state, if its user may read it.
pub(crate) fn fingerprint_in(paths: &Paths) -> Option<Fingerprint> {
    let text = disk::RealDisk.read(&paths.certificate(), LONGEST_FILE).ok()?;
    Some(fingerprint(&CertificateDer::from_pem_slice(&text).ok()?))
}

/// Reads a fingerprint: 64 hexadecimal digits, with or without colons.
pub(crate) fn read_fingerprint(text: &str) -> Option<Fingerprint> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| *c != ':')
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|d| 16 * d[0] + d[1]).collect();
    if digits.len() == 64 { bytes.try_into().ok() } else { None }
}

/// The client's side of a connection to the daemon with this fingerprint.
pub(crate) fn connection(pinned: Fingerprint, host: &str) -> Result<ClientConnection, Error> {
    let provider = provider();
    let verifier = Pinned { pinned, provider: Arc::clone(&provider) };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    let name = ServerName::try_from(host.to_string())
        .unwrap_or_else(|_| ServerName::try_from("localhost").expect("this is a name"));
    ClientConnection::new(Arc::new(config), name)
}

/// Whether a connection failed because somebody else answered.
pub(crate) fn is_stranger(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|e| e.downcast_ref::<Error>());
    matches!(
        inner,
        Some(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    )
}

/// Accepts one certificate.
#[derive(Debug)]
struct Pinned {
    pinned: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if same(&fingerprint(end_entity), &self.pinned) {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
        }
    }

    // That the peer has the key of the certificate is shown by its signature.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::disk::RealDisk;
    use rustls::{ServerConnection, StreamOwned};
    use std::fs;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    /// What the peer with this identity receives from a client that pins the other fingerprint.
    fn received(identity: &Identity, pinned: Fingerprint) -> (io::Result<()>, Vec<u8>) {
        let (here, there) = UnixStream::pair().unwrap();
        let server = ServerConnection::new(Arc::clone(&identity.config)).unwrap();
        let peer = std::thread::spawn(move || {
            let mut got = Vec::new();
            let _ = StreamOwned::new(server, there).read_to_end(&mut got);
            got
        });
        let client = connection(pinned, "127.0.0.1").unwrap();
        let mut stream = StreamOwned::new(client, here);
        let sent = stream.write_all(b"token").and_then(|()| {
            stream.conn.send_close_notify();
            stream.flush()
        });
        drop(stream);
        (sent, peer.join().unwrap())
    }

    #[test]
    fn a_client_sends_nothing_to_a_stranger() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, strange] = folders.each_ref().map(|f| Paths::new(f.path()));
        let identity = Identity::of(&ours, &RealDisk).unwrap();
        let stranger = Identity::of(&strange, &RealDisk).unwrap();
        let pinned = fingerprint_in(&ours).unwrap();
        assert_eq!(hex(&pinned), identity.fingerprint);
        let (sent, got) = received(&identity, pinned);
        assert!(sent.is_ok() && got == b"token");
        let (sent, got) = received(&stranger, pinned);
        assert!(is_stranger(&sent.unwrap_err()) && got.is_empty());
    }

    #[test]
    fn a_certificate_is_made_once_and_its_key_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path());
        let first = Identity::of(&paths, &RealDisk).unwrap().fingerprint;
        assert_eq!(Identity::of(&paths, &RealDisk).unwrap().fingerprint, first);
        for path in [paths.key(), paths.certificate()] {
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        fs::write(paths.certificate(), "nonsense").unwrap();
        assert!(Identity::of(&paths, &RealDisk).is_err());
        fs::remove_file(paths.certificate()).unwrap();
        assert_ne!(Identity::of(&paths, &RealDisk).unwrap().fingerprint, first);
    }

    #[test]
    fn fingerprints_are_read_with_and_without_colons() {
        let text = "0f".repeat(32);
        assert_eq!(read_fingerprint(&text), Some([15; 32]));
        let pairs: Vec<&str> = std::iter::repeat_n("0F", 32).collect();
        assert_eq!(read_fingerprint(&pairs.join(":")), Some([15; 32]));
        for bad in ["", "0f", &text[1..], &format!("{text}0f"), &text.replace('f', "g")] {
            assert_eq!(read_fingerprint(bad), None, "{bad}");
        }
    }
}
