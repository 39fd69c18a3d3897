//! The certificate of the webhook: given as files, which are read again when they change, or made
//! at the start and told to the API server.

use crate::client::{Access, Error, Failure, client, get, send};
use http::Method;
use k8s_openapi::ByteString;
use kube::Client;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// How often files, and what the API server trusts, are looked at again.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// Most certificates that the API server is asked to trust: those of replicas, and of some that
/// have ended.
const MOST_TRUSTED: usize = 8;
/// How often it is tried to change what another one changed meanwhile.
const ATTEMPTS: u32 = 5;

/// How the webhook proves who it is.
#[derive(Clone, Debug)]
pub enum Certificate {
    /// By files, which somebody renews.
    Files {
        /// The certificate, and those between it and its authority.
        certificate: PathBuf,
        /// Its key.
        key: PathBuf,
    },
    /// By a certificate of its own making, which it adds to what the API server trusts.
    Own {
        /// The API server.
        access: Access,
        /// Name of its `MutatingWebhookConfiguration`.
        configuration: String,
    },
}

/// A certificate in use.
pub(super) struct Identity {
    config: Arc<ServerConfig>,
    source: Source,
}

enum Source {
    /// Files with what was in them.
    Files {
        certificate: PathBuf,
        key: PathBuf,
        read: (Vec<u8>, Vec<u8>),
    },
    Own {
        client: Client,
        configuration: String,
        pem: String,
    },
}

impl Identity {
    /// The certificate as it is now.
    pub(super) async fn of(
        certificate: &Certificate,
        told: &mut dyn FnMut(&str),
    ) -> Result<Self, Error> {
        match certificate {
            Certificate::Files { certificate, key } => {
                let read = read(certificate, key)?;
                let config = config(&read.0, &read.1).map_err(unusable(certificate))?;
                let (certificate, key) = (certificate.clone(), key.clone());
                Ok(Self { config, source: Source::Files { certificate, key, read } })
            }
            Certificate::Own { access, configuration } => {
                let client = client(access).await?;
                let found = look(&client, configuration).await?;
                let made = rcgen::generate_simple_self_signed(names_in(&found));
                let made = made.map_err(|e| Error::Other(format!("own certificate: {e}")))?;
                let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
                let config = config(pem.as_bytes(), key.as_bytes());
                let config = config.map_err(|e| Error::Other(format!("own certificate: {e}")))?;
                trust(&client, configuration, &pem).await?;
                told(&format!("certificate: its own, in {CONFIGURATIONS} {configuration}"));
                let configuration = configuration.clone();
                Ok(Self { config, source: Source::Own { client, configuration, pem } })
            }
        }
    }

    /// For a new connection.
    pub(super) fn config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.config)
    }

    /// Takes files that were renewed; tells the API server again what it has forgotten. What does
    /// not work is told and tried again later.
    pub(super) async fn renew(&mut self, told: &mut dyn FnMut(&str)) {
        match &mut self.source {
            Source::Files { certificate, key, read: before } => {
                let now = match read(certificate, key) {
                    Ok(now) if now == *before => return,
                    Ok(now) => now,
                    Err(e) => return told(&format!("certificate: {e}; goes on with the old one")),
                };
                match config(&now.0, &now.1) {
                    Ok(config) => {
                        (self.config, *before) = (config, now);
                        told("certificate: renewed");
                    }
                    Err(e) => told(&format!("certificate: {e}; goes on with the old one")),
                }
            }
            Source::Own { client, configuration, pem } => {
                match trust(client, configuration, pem).await {
                    Ok(false) => {}
                    Ok(true) => told(&format!("certificate: told {configuration} again")),
                    Err(e) => told(&format!("certificate: {e}")),
                }
            }
        }
    }
}

fn read(certificate: &Path, key: &Path) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let read = |path: &Path| {
        std::fs::read(path)
            .map_err(Error::io(format!("could not read {:?}", path.display().to_string())))
    };
    Ok((read(certificate)?, read(key)?))
}

fn unusable(path: &Path) -> impl FnOnce(String) -> Error {
    let path = path.display().to_string();
    move |e| Error::Other(format!("could not use the certificate {path:?}: {e}"))
}

fn config(certificate: &[u8], key: &[u8]) -> Result<Arc<ServerConfig>, String> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
    let chain = chain.map_err(|e| e.to_string())?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| format!("its key: {e}"))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|c| c.with_no_client_auth().with_single_cert(chain, key));
    config.map(Arc::new).map_err(|e| e.to_string())
}

const CONFIGURATIONS: &str = "MutatingWebhookConfiguration";

fn path(configuration: &str) -> String {
    format!("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{configuration}")
}

fn failed(configuration: &str) -> impl FnOnce(Failure) -> Error {
    let what = format!("{CONFIGURATIONS} {configuration}");
    move |failure| Error::Other(format!("{what}: {failure}"))
}

async fn look(client: &Client, configuration: &str) -> Result<Value, Error> {
    get(client, &path(configuration)).await.map_err(failed(configuration))
}

fn webhooks(configuration: &Value) -> impl Iterator<Item = &Value> {
    configuration.get("webhooks").and_then(Value::as_array).into_iter().flatten()
}

/// The names by which the API server calls these webhooks.
fn names_in(configuration: &Value) -> Vec<String> {
    let mut names: Vec<String> = webhooks(configuration)
        .filter_map(|webhook| {
            let config = webhook.get("clientConfig")?;
            let text = |pointer: &str| config.pointer(pointer).and_then(Value::as_str);
            match text("/url") {
                Some(url) => Some(url.parse::<http::Uri>().ok()?.host()?.to_string()),
                None => {
                    Some(format!("{}.{}.svc", text("/service/name")?, text("/service/namespace")?))
                }
            }
        })
        .map(|name| name.trim_matches(['[', ']']).to_string())
        .collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() { vec!["localhost".into()] } else { names }
}

/// Lets the API server trust this certificate for all webhooks of the configuration; whether that
/// was necessary. Certificates of other replicas stay trusted.
async fn trust(client: &Client, configuration: &str, pem: &str) -> Result<bool, Error> {
    for _ in 0..ATTEMPTS {
        let found = look(client, configuration).await?;
        let Some(patch) = patch(&found, pem) else { return Ok(false) };
        let (path, kind) = (path(configuration), "application/json-patch+json");
        match send(client, Method::PATCH, &path, kind, &patch).await {
            Ok(_) => return Ok(true),
            // Another one changed it meanwhile.
            Err(failure) if [409, 422].contains(&failure.code) => {}
            Err(failure) => return Err(failed(configuration)(failure)),
        }
    }
    Err(Error::Other(format!("{CONFIGURATIONS} {configuration}: others change it all the time")))
}

/// A patch that adds a certificate to what is trusted, where it is not; the newest is the last.
fn patch(configuration: &Value, pem: &str) -> Option<Value> {
    let version = &configuration["metadata"]["resourceVersion"];
    let mut operations =
        vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": version})];
    for (i, webhook) in webhooks(configuration).enumerate() {
        let bundle = webhook.pointer("/clientConfig/caBundle").cloned().unwrap_or(json!(""));
        let bundle = serde_json::from_value::<ByteString>(bundle).unwrap_or_default().0;
        let bundle = String::from_utf8_lossy(&bundle);
        let mut trusted: Vec<&str> = bundle.split_inclusive(END).map(str::trim).collect();
        trusted.retain(|one| one.ends_with(END));
        if trusted.contains(&pem.trim()) {
            continue;
        }
        trusted.push(pem.trim());
        let newest = &trusted[trusted.len().saturating_sub(MOST_TRUSTED)..];
        let bundle = ByteString((newest.join("\n") + "\n").into_bytes());
        let path = format!("/webhooks/{i}/clientConfig/caBundle");
        operations.push(json!({"op": "add", "path": path, "value": bundle}));
    }
    (operations.len() > 1).then(|| json!(operations))
}

/// The last line of a certificate.
const END: &str = "-----END CERTIFICATE-----";

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(bundle: Option<&str>) -> Value {
        let bundle = bundle.map(|b| ByteString(b.as_bytes().to_vec()));
        json!({"metadata": {"resourceVersion": "7"}, "webhooks": [
            {"clientConfig": {"url": "https://127.0.0.1:9443/mutate", "caBundle": bundle}},
            {"clientConfig": {"service": {"name": "hook", "namespace": "roommate"}}},
        ]})
    }

    fn pem(n: usize) -> String {
        format!("-----BEGIN CERTIFICATE-----\nAAA{n}\n{END}\n")
    }

    #[test]
    fn a_certificate_is_for_the_names_that_are_called() {
        assert_eq!(names_in(&configuration(None)), ["127.0.0.1", "hook.roommate.svc"]);
        assert_eq!(names_in(&json!({})), ["localhost"]);
    }

    #[test]
    fn what_is_trusted_grows_up_to_a_limit() {
        let mut found = configuration(None);
        for n in 0..MOST_TRUSTED + 3 {
            let operations = patch(&found, &pem(n)).unwrap();
            let operations: json_patch::Patch = serde_json::from_value(operations).unwrap();
            json_patch::patch(&mut found, &operations).unwrap();
            assert_eq!(patch(&found, &pem(n)), None, "it is trusted now");
        }
        for webhook in webhooks(&found) {
            let bundle = webhook["clientConfig"]["caBundle"].clone();
            let bundle = serde_json::from_value::<ByteString>(bundle).unwrap().0;
            let expect: String = (3..MOST_TRUSTED + 3).map(pem).collect();
            assert_eq!(String::from_utf8(bundle).unwrap(), expect);
        }
    }

    #[test]
    fn own_and_given_certificates_can_be_used() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
        assert!(config(pem.as_bytes(), key.as_bytes()).is_ok());
        let other = rcgen::generate_simple_self_signed(["localhost".to_string()]).unwrap();
        let other = other.signing_key.serialize_pem();
        assert!(config(pem.as_bytes(), other.as_bytes()).is_err(), "the key of another");
        assert!(config(b"", key.as_bytes()).is_err());
    }
}
