//! The section `service` of a job file: how requests reach a service, and what latency it keeps.

use crate::api::job_file::check::{check_label, quoted};
use crate::api::job_file::{JobFile, Length};
use crate::protocol::front::{self, FrontSpec, ServerSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Longest objective, in seconds.
const LONGEST_OBJECTIVE_S: f64 = 3_600.0;
/// Longest time for which a batch is waited for to fill, in seconds.
const LONGEST_FILL_S: f64 = 60.0;
/// Most requests in a batch, and most that wait.
const MOST_BATCH: u32 = 65_536;
const MOST_QUEUED: u32 = 1_000_000;
/// Most requests a second that may be expected.
const MOST_RATE: f64 = 1e9;
/// Longest path of a health check.
const LONGEST_HEALTH: usize = 1_000;

/// How requests reach a service, and what latency it keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Name of the model in requests; the default is the job's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The latency that it has to keep.
    pub slo: Objective,
    /// The port at which it takes requests.
    pub port: u16,
    /// The address at which it takes requests.
    #[serde(default = "this_machine")]
    pub listen: IpAddr,
    /// Most requests in a batch.
    #[serde(default = "usual_batch")]
    pub max_batch: u32,
    /// How long a batch is waited for to fill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<Length>,
    /// Most requests that wait; further ones are refused.
    #[serde(default = "usual_queue")]
    pub queue: u32,
    /// Requests a second that its user expects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// What answers the batches.
    #[serde(default)]
    pub server: Server,
    /// The path that answers once a server of its own is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<String>,
    /// The port of a server of its own; if not given, the front chooses one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_port: Option<u16>,
}

/// What answers the batches of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Server {
    /// The command, through the SDK.
    #[default]
    Sdk,
    /// The command is an HTTP server.
    Http,
}

/// An objective: `{p99: 25ms}`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, Length>", into = "BTreeMap<String, Length>")]
pub struct Objective {
    /// The part of the requests that has to keep it, one of [`QUANTILES`].
    quantile: f64,
    /// The latency.
    latency: Length,
}

/// Quantiles that an objective may be about.
const QUANTILES: &[(&str, f64)] =
    &[("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("p999", 0.999)];

impl TryFrom<BTreeMap<String, Length>> for Objective {
    type Error = String;
    fn try_from(map: BTreeMap<String, Length>) -> Result<Self, String> {
        let mut all = map.into_iter();
        let (Some((found, latency)), None) = (all.next(), all.next()) else {
            return Err("expected one objective such as {p99: 25ms}".into());
        };
        let known = QUANTILES.iter().find(|(name, _)| *name == found);
        let Some(&(_, quantile)) = known else {
            let names: Vec<&str> = QUANTILES.iter().map(|(name, _)| *name).collect();
            let found = quoted(&found);
            return Err(format!("expected one of {}, found {found}", names.join(", ")));
        };
        Ok(Self { quantile, latency })
    }
}

impl From<Objective> for BTreeMap<String, Length> {
    fn from(Objective { quantile, latency }: Objective) -> Self {
        let named = QUANTILES.iter().filter(|(_, q)| *q == quantile);
        named.map(|(name, _)| (name.to_string(), latency)).collect()
    }
}

impl Objective {
    /// The latency in µs.
    pub(crate) fn us(&self) -> u32 {
        (self.latency.0 * 1e6).round() as u32
    }
}

fn this_machine() -> IpAddr {
    Ipv4Addr::LOCALHOST.into()
}

fn usual_batch() -> u32 {
    32
}

fn usual_queue() -> u32 {
    1024
}

impl Service {
    /// Where it takes requests.
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(self.listen, self.port)
    }

    /// Whether both cannot take requests at the same time.
    pub(crate) fn collides_with(&self, other: &Self) -> bool {
        let everywhere = self.listen.is_unspecified() || other.listen.is_unspecified();
        self.port == other.port && (everywhere || self.listen == other.listen)
    }

    /// How its front is started, for the job of this name.
    pub(crate) fn front(&self, job: &str) -> FrontSpec {
        FrontSpec {
            name: job.into(),
            model: self.model.clone().unwrap_or_else(|| job.into()),
            listen: self.address(),
            objective: front::Objective {
                quantile: self.slo.quantile,
                ms: 1e3 * self.slo.latency.0,
            },
            max_batch: self.max_batch,
            fill_ms: self.fill.map(|fill| 1e3 * fill.0),
            queue: self.queue,
            server: match self.server {
                Server::Sdk => ServerSpec::Sdk {},
                Server::Http => ServerSpec::Http {
                    port: self.server_port.unwrap_or(0),
                    health: self.health.clone().unwrap_or_else(|| "/health".into()),
                },
            },
        }
    }

    /// What is wrong with it.
    fn check(&self) -> Result<(), String> {
        check_label("service.model", self.model.as_deref())?;
        let objective_s = self.slo.latency.0;
        if !(1e-6..=LONGEST_OBJECTIVE_S).contains(&objective_s) {
            return Err(format!(
                "service.slo: expected more than 0 and at most 1h, found {objective_s} s"
            ));
        }
        let most_s = objective_s.min(LONGEST_FILL_S);
        if let Some(fill) = self.fill.filter(|f| f.0 >= most_s) {
            return Err(format!(
                "service.fill: expected less than {most_s} s, of an objective of {objective_s} s, \
                 found {} s",
                fill.0
            ));
        }
        for (field, port) in [("port", Some(self.port)), ("server_port", self.server_port)] {
            if port == Some(0) {
                return Err(format!("service.{field}: expected 1 to 65535, found 0"));
            }
        }
        for (field, n, most) in
            [("max_batch", self.max_batch, MOST_BATCH), ("queue", self.queue, MOST_QUEUED)]
        {
            if !(1..=most).contains(&n) {
                return Err(format!("service.{field}: expected 1 to {most}, found {n}"));
            }
        }
        if let Some(rate) = self.rate.filter(|r| !(*r > 0.0 && *r <= MOST_RATE)) {
            return Err(format!("service.rate: expected above 0 to {MOST_RATE}, found {rate}"));
        }
        self.check_server()
    }

    fn check_server(&self) -> Result<(), String> {
        if self.server == Server::Sdk {
            let only_http =
                [("health", self.health.is_some()), ("server_port", self.server_port.is_some())];
            return match only_http.into_iter().find(|(_, given)| *given) {
                Some((field, _)) => Err(format!("service.{field}: only for `server: http`")),
                None => Ok(()),
            };
        }
        if self.server_port == Some(self.port) {
            let port = self.port;
            return Err(format!("service.server_port: {port} is where requests are taken"));
        }
        if let Some(health) = &self.health {
            let plain = health.chars().all(|c| c.is_ascii_graphic());
            if !health.starts_with('/') || !plain || health.len() > LONGEST_HEALTH {
                let found = quoted(health);
                return Err(format!(
                    "service.health: expected a path such as /health, found {found}"
                ));
            }
        }
        Ok(())
    }
}

impl JobFile {
    /// What is wrong with the job as a service, or as one that is none.
    pub(super) fn check_service(&self) -> Result<(), String> {
        use crate::api::job_file::ClassName;
        let serves = self.class == Some(ClassName::Service);
        let Some(service) = &self.service else {
            return if serves {
                Err("service: a job of `class: service` needs this section, with `slo` and `port`"
                    .into())
            } else {
                Ok(())
            };
        };
        if !serves {
            return Err("service: only for a job of `class: service`".into());
        }
        let of_training = [
            ("steps", self.steps.is_some()),
            ("step_s", self.step_s.is_some()),
            ("stages_s", self.stages_s.is_some()),
            ("deadline", self.deadline.is_some()),
        ];
        if let Some((field, _)) = of_training.into_iter().find(|(_, given)| *given) {
            return Err(format!("{field}: a service has no steps and never finishes"));
        }
        if self.batch.is_some() {
            return Err("batch: of a service, `max_batch` in the section `service` is meant".into());
        }
        service.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const LEAST: &str = "command: x\nclass: service\nservice: {slo: {p99: 25ms}, port: 8000}\n";

    fn read(text: &str) -> Result<JobFile, String> {
        JobFile::read(text, Path::new("bert.yaml")).map_err(|e| e.to_string())
    }

    fn service(fields: &str) -> Result<Service, String> {
        let text = format!("command: x\nclass: service\nservice: {{{fields}}}\n");
        read(&text).map(|job| job.service.unwrap())
    }

    #[test]
    fn an_objective_and_a_port_suffice() {
        let job = read(LEAST).unwrap();
        let service = job.service.as_ref().unwrap();
        assert_eq!(service.slo.us(), 25_000);
        let front = service.front(job.name());
        assert_eq!((front.name.as_str(), front.model.as_str()), ("bert", "bert"));
        assert_eq!(front.listen.to_string(), "127.0.0.1:8000");
        assert_eq!((front.max_batch, front.fill_ms, front.queue), (32, None, 1024));
        assert_eq!(front.server, ServerSpec::Sdk {});
        // As it is sent to a daemon.
        let sent = serde_json::to_string(&job).unwrap();
        assert_eq!(serde_json::from_str::<JobFile>(&sent).unwrap(), job);
    }

    #[test]
    fn every_field_reaches_the_front() {
        let all = "model: m, slo: {p999: 1s}, port: 80, listen: '::', max_batch: 4, fill: 5ms, \
                   queue: 9, rate: 100, server: http, health: /ok, server_port: 81";
        let front = service(all).unwrap().front("job");
        assert_eq!(front.listen.to_string(), "[::]:80");
        assert_eq!((front.objective.quantile, front.objective.ms), (0.999, 1000.0));
        assert_eq!((front.max_batch, front.fill_ms, front.queue), (4, Some(5.0), 9));
        assert_eq!(front.server, ServerSpec::Http { port: 81, health: "/ok".into() });
    }

    #[test]
    fn mistakes_are_named() {
        let refused = |fields: &str, what: &str| {
            let error = service(fields).unwrap_err();
            assert!(error.contains(what), "{fields}: {error}");
        };
        let good = "slo: {p99: 25ms}, port: 8000";
        refused("port: 8000", "missing field `slo`");
        refused("slo: {p99: 25ms}", "missing field `port`");
        refused(
            "slo: {p98: 25ms}, port: 1",
            "expected one of p50, p90, p95, p99, p999, found \"p98\"",
        );
        refused("slo: {p99: 25ms, p50: 5ms}, port: 1", "expected one objective such as");
        refused("slo: {p99: 0}, port: 1", "service.slo: expected more than 0 and at most 1h");
        refused("slo: {p99: 2h}, port: 1", "service.slo: expected more than 0 and at most 1h");
        refused("slo: {p99: 25ms}, port: 0", "service.port: expected 1 to 65535, found 0");
        refused("slo: {p99: 25ms}, port: 70000", "port");
        refused(&format!("{good}, listen: here"), "IP address");
        refused(
            &format!("{good}, max_batch: 0"),
            "service.max_batch: expected 1 to 65536, found 0",
        );
        refused(&format!("{good}, max_batch: 65537"), "service.max_batch: expected 1 to 65536");
        refused(&format!("{good}, queue: 0"), "service.queue: expected 1 to 1000000, found 0");
        refused(&format!("{good}, fill: 25ms"), "service.fill: expected less than 0.025 s");
        refused(&format!("{good}, rate: 0"), "service.rate: expected above 0");
        refused(&format!("{good}, server: grpc"), "unknown variant `grpc`");
        refused(&format!("{good}, health: /x"), "service.health: only for `server: http`");
        refused(&format!("{good}, server_port: 9"), "service.server_port: only for `server: http`");
        let http = format!("{good}, server: http");
        refused(&format!("{http}, health: x"), "service.health: expected a path such as /health");
        refused(&format!("{http}, server_port: 8000"), "service.server_port: 8000 is where");
        refused(&format!("{good}, prot: 1"), "unknown field `prot`");
    }

    #[test]
    fn services_and_training_are_told_apart() {
        let refused = |text: &str, what: &str| {
            let error = read(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        };
        refused(
            "command: x\nclass: service",
            "service: a job of `class: service` needs this section",
        );
        let section = "service: {slo: {p99: 25ms}, port: 8000}";
        refused(&format!("command: x\n{section}"), "service: only for a job of `class: service`");
        for field in ["steps: 5", "step_s: 1", "deadline: 2h", "stages_s: [1, 1, 1, 1]"] {
            refused(&format!("{LEAST}{field}"), "a service has no steps and never finishes");
        }
        refused(
            &format!("{LEAST}batch: {{size: 1, min: 1, max: 2}}"),
            "`max_batch` in the section",
        );
    }

    #[test]
    fn a_port_is_taken_by_one_service() {
        let at = |listen: &str, port: u16| {
            service(&format!("slo: {{p99: 1s}}, listen: '{listen}', port: {port}")).unwrap()
        };
        assert!(at("127.0.0.1", 80).collides_with(&at("127.0.0.1", 80)));
        assert!(at("0.0.0.0", 80).collides_with(&at("127.0.0.1", 80)));
        assert!(!at("127.0.0.1", 80).collides_with(&at("127.0.0.1", 81)));
        assert!(!at("127.0.0.2", 80).collides_with(&at("127.0.0.1", 80)));
    }
}
