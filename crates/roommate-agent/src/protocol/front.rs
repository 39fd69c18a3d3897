//! What the front of a service is started with: `roommate front --spec JSON -- COMMAND WORD...`.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A service as its front has to run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontSpec {
    /// Name of the job.
    pub name: String,
    /// Name of the model in requests.
    pub model: String,
    /// Where requests are taken.
    pub listen: SocketAddr,
    /// The latency that it has to keep.
    pub objective: Objective,
    /// Most requests in a batch.
    pub max_batch: u32,
    /// How long a batch is waited for to fill, in milliseconds; `None` = the front chooses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill_ms: Option<f64>,
    /// Most requests that wait; further ones are refused.
    pub queue: u32,
    /// What answers the batches.
    pub server: ServerSpec,
}

/// A latency, and how many of the requests have to keep it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Objective {
    /// The part of the requests that has to keep it, 0 to 1.
    pub quantile: f64,
    /// The latency in milliseconds.
    pub ms: f64,
}

impl Objective {
    /// The part of the requests that may be late.
    pub(crate) fn may_be_late(&self) -> f64 {
        1.0 - self.quantile
    }
}

/// What answers the batches of a service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ServerSpec {
    /// A command that uses the SDK.
    Sdk {},
    /// A server of its own, which gets its port as `PORT`.
    Http {
        /// Its port; 0 = the front chooses one.
        port: u16,
        /// The path that answers once it is ready.
        health: String,
    },
}

#[cfg(test)]
impl FrontSpec {
    /// A service with the SDK, for tests.
    pub(crate) fn example() -> Self {
        Self {
            name: "bert".into(),
            model: "bert".into(),
            listen: "127.0.0.1:8000".parse().unwrap(),
            objective: Objective { quantile: 0.99, ms: 25.0 },
            max_batch: 32,
            fill_ms: Some(2.0),
            queue: 1024,
            server: ServerSpec::Sdk {},
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The front reads exactly this.
    #[test]
    fn the_spec_is_written_as_fronts_read_it() {
        let spec = FrontSpec::example();
        assert_eq!(
            serde_json::to_string(&spec).unwrap(),
            r#"{"name":"bert","model":"bert","listen":"127.0.0.1:8000","objective":{"quantile":0.99,"ms":25.0},"max_batch":32,"fill_ms":2.0,"queue":1024,"server":{"sdk":{}}}"#
        );
        let http = ServerSpec::Http { port: 9000, health: "/health".into() };
        let text = serde_json::to_string(&http).unwrap();
        assert_eq!(text, r#"{"http":{"port":9000,"health":"/health"}}"#);
    }
}
