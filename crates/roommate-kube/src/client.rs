//! The client of the API server, and what its errors mean to somebody who wrote something.

use crate::world::Answer;
use http::{Method, Request};
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use kube::Client;

/// How long a write may take before its outcome counts as unknown.
pub const WITHIN: Duration = Duration::from_secs(5);

/// How to reach the API server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// A kubeconfig file; if not given, what `KUBECONFIG` names, `~/.kube/config`, or the service
    /// account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig, if not its current one.
    pub context: Option<String>,
}

/// Why a cluster cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No configuration.
    #[error("{what}")]
    Config {
        /// Which, and what is wrong with it.
        what: String,
    },
    /// The API server refused, or did not answer.
    #[error("{doing}: {source}")]
    Api {
        /// What was to be done.
        doing: String,
        /// What came back.
        #[source]
        source: Box<kube::Error>,
    },
    /// A policy that does not exist, or does not take these parameters.
    #[error(transparent)]
    Policy(#[from] roommate_core::policy::PolicyError),
    /// Something of this machine.
    #[error("{doing}: {source}")]
    Io {
        /// What was to be done.
        doing: String,
        /// What went wrong.
        #[source]
        source: std::io::Error,
    },
    /// The devices of this machine.
    #[error(transparent)]
    Agent(Box<roommate_agent::AgentError>),
    /// Another scheduler leads now.
    #[error("{0}")]
    Lost(String),
    /// Something else that is told in words.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// Puts what was being done in front of an error of the API.
    pub fn api(doing: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Api { doing, source: Box::new(source) }
    }

    /// An error of this machine's devices.
    pub fn agent(source: roommate_agent::AgentError) -> Self {
        Self::Agent(Box::new(source))
    }

    /// Puts what was being done in front of an error of the machine.
    pub fn io(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }
}

/// The configuration of the client.
pub async fn config(access: &Access) -> Result<Config, Error> {
    let options = KubeConfigOptions { context: access.context.clone(), ..Default::default() };
    let wrong = |what: String| Error::Config { what };
    let read = |path: &Path| {
        Kubeconfig::read_from(path).map_err(|e| wrong(format!("{}: {e}", path.display())))
    };
    let mut config = match (&access.kubeconfig, &access.context) {
        (Some(path), _) => Config::from_custom_kubeconfig(read(path)?, &options)
            .await
            .map_err(|e| wrong(format!("{}: {e}", path.display())))?,
        (None, Some(_)) => Config::from_kubeconfig(&options)
            .await
            .map_err(|e| wrong(format!("kubeconfig: {e}")))?,
        (None, None) => Config::infer().await.map_err(|e| {
            wrong(format!(
                "no cluster is configured: {e}; give --kubeconfig FILE, or set KUBECONFIG"
            ))
        })?,
    };
    // Who writes decides when to write again: an answer that is late may be wrong by then.
    config.default_retry = false;
    Ok(config)
}

/// The client.
pub async fn client(access: &Access) -> Result<Client, Error> {
    Ok(client_in(access).await?.0)
}

/// The client, and the namespace that is meant where none is named.
pub async fn client_in(access: &Access) -> Result<(Client, String), Error> {
    let config = config(access).await?;
    let namespace = config.default_namespace.clone();
    let server = config.cluster_url.to_string();
    let client = Client::try_from(config).map_err(Error::api(format!("API server {server}")))?;
    Ok((client, namespace))
}

/// Sends JSON; `kind` is the content type. Waits for the answer for a bounded time.
pub async fn send(
    client: &Client,
    method: Method,
    path: &str,
    kind: &str,
    body: &Value,
) -> Result<String, Failure> {
    let body = serde_json::to_vec(body).expect("a JSON value can always be written");
    let request = Request::builder().method(method).uri(path).header("content-type", kind);
    let request = request.body(body).map_err(|e| Failure::told(format!("{path}: {e}")))?;
    match tokio::time::timeout(WITHIN, client.request_text(request)).await {
        Ok(Ok(text)) => Ok(text),
        Ok(Err(error)) => Err(Failure::of(&error)),
        Err(_) => {
            Err(Failure { code: 0, what: format!("no answer within {} s", WITHIN.as_secs()) })
        }
    }
}

/// Reads an object as JSON.
pub async fn get(client: &Client, path: &str) -> Result<Value, Failure> {
    let request = Request::get(path).body(Vec::new());
    let request = request.map_err(|e| Failure::told(format!("{path}: {e}")))?;
    match tokio::time::timeout(WITHIN, client.request::<Value>(request)).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Failure::of(&error)),
        Err(_) => {
            Err(Failure { code: 0, what: format!("no answer within {} s", WITHIN.as_secs()) })
        }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The HTTP status; 0 if none came back.
    pub code: u16,
    /// What the server said.
    pub what: String,
}

impl Failure {
    fn told(what: String) -> Self {
        Self { code: 400, what }
    }

    fn of(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self { code: status.code, what: status.message.clone() },
            other => Self { code: 0, what: other.to_string() },
        }
    }

    /// What it means for a write. Whoever got a 5xx or no answer does not know whether the write
    /// was done.
    pub fn answer(&self) -> Answer {
        match self.code {
            429 => Answer::Later,
            0 | 500.. => Answer::Lost,
            _ => Answer::Refused,
        }
    }
}

impl std::error::Error for Failure {}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.code {
            0 => f.write_str(&self.what),
            code => write!(f, "{} ({code})", self.what),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_that_says_so_is_a_refusal() {
        let answer = |code| Failure { code, what: String::new() }.answer();
        for code in [400, 403, 404, 409, 410, 422] {
            assert_eq!(answer(code), Answer::Refused, "{code}");
        }
        assert_eq!(answer(429), Answer::Later);
        for code in [0, 500, 502, 503, 504] {
            assert_eq!(answer(code), Answer::Lost, "{code}");
        }
    }
}
