//! The cluster as the operator describes it: groups of equal nodes, written
//! `8x8:v100,4x8:a100/80g`.
//!
//! A description only; which GPUs are idle and which nodes are down is kept in [`crate::state`].

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A GPU model.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuModel {
    /// Its name in lower case, `v100`.
    pub name: String,
    /// Memory of one GPU in MiB; 0 = not known, not checked.
    pub mem_mib: u32,
    /// Training speed relative to the reference GPU (a V100) for profiles without measurements.
    pub speed: f64,
    /// Price of one GPU in US dollars per hour, for policies that minimize cost.
    pub price_usd_h: f64,
}

/// Name, memory in MiB, approximate training speed relative to a V100, US dollars per hour. The
/// speeds are defaults for traces without measurements (ratios of published mixed-precision CNN
/// training throughput, rounded); `8x8:a100=1.7` overrides one. Prices: K80, P100 and V100 as in
/// the Gavel study (OSDI 2020); the others in proportion to current cloud prices.
const KNOWN: &[(&str, u32, f64, f64)] = &[
    ("gpu", 0, 1.0, 1.0),
    ("k80", 12_288, 0.25, 0.135),
    ("p100", 16_384, 0.6, 0.43),
    ("t4", 15_360, 0.5, 0.11),
    ("v100", 16_384, 1.0, 0.74),
    ("a100", 40_960, 2.0, 1.2),
    ("h100", 81_920, 3.5, 3.0),
    ("h200", 144_384, 4.0, 3.5),
];

/// A group of equal nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeGroup {
    /// Number of nodes.
    pub count: u32,
    /// GPUs per node.
    pub gpus: u16,
    /// Index into [`Cluster::gpu_models`].
    pub gpu_model: u8,
    /// CPU per node in thousandths of a core; 0 = not known, not checked.
    pub cpu_milli: u32,
    /// Host memory per node in MiB; 0 = not known, not checked.
    pub host_mib: u32,
}

/// The whole cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cluster {
    /// The GPU models of its nodes.
    pub gpu_models: Vec<GpuModel>,
    /// Groups of nodes in index order.
    pub groups: Vec<NodeGroup>,
}

/// Why a cluster description cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("could not read cluster {text:?}: {what}")]
pub struct ClusterError {
    text: String,
    /// The part that was wrong, and what was expected.
    pub what: String,
}

impl Cluster {
    /// A description with more GPUs than this is taken for a typing error.
    pub const MAX_GPUS: u64 = 1_000_000;

    /// Number of GPUs.
    pub fn gpus(&self) -> u32 {
        self.groups.iter().map(|g| g.count * u32::from(g.gpus)).sum()
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.groups.iter().map(|g| g.count).sum()
    }

    /// Index of the GPU model with this name, if a node has it.
    pub fn gpu_model(&self, name: &str) -> Option<u8> {
        self.gpu_models.iter().position(|k| k.name.eq_ignore_ascii_case(name)).map(|i| i as u8)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut cluster = Self { gpu_models: Vec::new(), groups: Vec::new() };
        for part in text.split(',') {
            cluster.parse_group(part.trim())?;
        }
        let gpus: u64 = cluster.groups.iter().map(|g| u64::from(g.count) * u64::from(g.gpus)).sum();
        if gpus > Self::MAX_GPUS {
            return Err(format!("{gpus} GPUs are more than the limit of {}", Self::MAX_GPUS));
        }
        Ok(cluster)
    }

    fn parse_group(&mut self, part: &str) -> Result<(), String> {
        let mut fields = part.split(':');
        let size = fields.next().unwrap_or_default();
        let (count, gpus) = size
            .split_once('x')
            .and_then(|(n, g)| Some((n.parse::<u32>().ok()?, g.parse::<u16>().ok()?)))
            .filter(|(n, g)| *n > 0 && *g > 0)
            .ok_or_else(|| format!("expected NODESxGPUS such as 8x8, found {size:?}"))?;
        let mut model_text = None;
        let (mut cpu_milli, mut host_mib) = (0, 0);
        for field in fields {
            if let Some(milli) = amount(field, 'c', 1000.0)? {
                cpu_milli = milli;
            } else if let Some(mib) = amount(field, 'g', 1024.0)? {
                host_mib = mib;
            } else if model_text.is_none() {
                model_text = Some(field);
            } else {
                return Err(format!("a node has one GPU model, found also {field:?}"));
            }
        }
        let gpu_model = self.parse_model(model_text.unwrap_or("gpu"))?;
        self.groups.push(NodeGroup { count, gpus, gpu_model, cpu_milli, host_mib });
        Ok(())
    }

    fn parse_model(&mut self, text: &str) -> Result<u8, String> {
        let (name, speed) = match text.split_once('=') {
            None => (text, None),
            Some((name, s)) => {
                let speed = s.parse::<f64>().ok().filter(|s| (1e-3..=1e3).contains(s));
                let speed = speed
                    .ok_or_else(|| format!("expected a speed of 0.001 to 1000, found {s:?}"))?;
                (name, Some(speed))
            }
        };
        let (name, mem_mib) = match name.split_once('/') {
            None => (name, None),
            Some((name, size)) => (name, Some(gpu_memory(size)?)),
        };
        let name = name.to_ascii_lowercase();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || !name.chars().all(plain) {
            return Err(format!("expected the name of a GPU model, found {text:?}"));
        }
        let known = KNOWN.iter().find(|k| k.0 == name);
        let speed = speed.or(known.map(|k| k.2)).unwrap_or(1.0);
        let mem_mib = mem_mib.or(known.map(|k| k.1)).unwrap_or(0);
        if let Some(k) = self.gpu_model(&name) {
            let same = &self.gpu_models[usize::from(k)];
            if same.speed != speed {
                return Err(format!("GPU model {name:?} has two different speeds"));
            }
            if same.mem_mib != mem_mib {
                return Err(format!("GPU model {name:?} has two different sizes of memory"));
            }
            return Ok(k);
        }
        if self.gpu_models.len() == 32 {
            return Err("more than 32 GPU models".into());
        }
        let price_usd_h = known.map_or(1.0, |k| k.3);
        self.gpu_models.push(GpuModel { name, mem_mib, speed, price_usd_h });
        Ok(self.gpu_models.len() as u8 - 1)
    }
}

/// A number followed by a unit, converted to the smaller unit; none if the field has another form.
fn amount(field: &str, unit: char, per_unit: f64) -> Result<Option<u32>, String> {
    match field.strip_suffix(unit).and_then(|n| n.parse::<f64>().ok()) {
        Some(n) if n > 0.0 && n <= 100_000.0 => Ok(Some((n * per_unit) as u32)),
        Some(_) => Err(format!("expected 1{unit} to 100000{unit}, found {field:?}")),
        None => Ok(None),
    }
}

/// Memory of a GPU in MiB, from `80g` or `143771m`; `0g` = not known.
fn gpu_memory(text: &str) -> Result<u32, String> {
    let parsed = |unit: char, mib: f64| {
        let n = text.strip_suffix(unit)?.parse::<f64>().ok()? * mib;
        (n == 0.0 || (1.0..=1e9).contains(&n)).then_some(n as u32)
    };
    parsed('g', 1024.0)
        .or_else(|| parsed('m', 1.0))
        .ok_or_else(|| format!("expected the memory of a GPU such as 80g, found {text:?}"))
}

impl FromStr for Cluster {
    type Err = ClusterError;
    fn from_str(text: &str) -> Result<Self, ClusterError> {
        Self::parse(text).map_err(|what| ClusterError { text: text.into(), what })
    }
}

impl TryFrom<String> for Cluster {
    type Error = ClusterError;
    fn try_from(text: String) -> Result<Self, ClusterError> {
        text.parse()
    }
}

impl From<Cluster> for String {
    fn from(cluster: Cluster) -> Self {
        cluster.to_string()
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, group) in self.groups.iter().enumerate() {
            let gpu_model = &self.gpu_models[usize::from(group.gpu_model)];
            let comma = if i == 0 { "" } else { "," };
            write!(f, "{comma}{}x{}", group.count, group.gpus)?;
            let known = KNOWN.iter().find(|k| k.0 == gpu_model.name);
            let (usual_mib, usual_speed) = known.map_or((0, 1.0), |k| (k.1, k.2));
            let (other_memory, other_speed) =
                (gpu_model.mem_mib != usual_mib, gpu_model.speed != usual_speed);
            if gpu_model.name != "gpu" || other_memory || other_speed {
                write!(f, ":{}", gpu_model.name)?;
            }
            match gpu_model.mem_mib {
                _ if !other_memory => {}
                mib if mib % 1024 == 0 => write!(f, "/{}g", mib / 1024)?,
                mib => write!(f, "/{mib}m")?,
            }
            if other_speed {
                write!(f, "={}", gpu_model.speed)?;
            }
            if group.cpu_milli > 0 {
                write!(f, ":{}c", f64::from(group.cpu_milli) / 1000.0)?;
            }
            if group.host_mib > 0 {
                write!(f, ":{}g", f64::from(group.host_mib) / 1024.0)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: &str) {
        let found = match text.parse::<Cluster>() {
            Ok(c) => format!("{c} = {} GPUs on {} nodes", c.gpus(), c.nodes()),
            Err(e) => e.to_string(),
        };
        assert_eq!(found, expect);
    }

    #[test]
    fn descriptions_read_and_print_the_same() {
        check("8x8", "8x8 = 64 GPUs on 8 nodes");
        check("8x8:v100,4x8:a100", "8x8:v100,4x8:a100 = 96 GPUs on 12 nodes");
        check("2x4:A100=1.7:96c", "2x4:a100=1.7:96c = 8 GPUs on 2 nodes");
        check("4x8:v100:24c:500g", "4x8:v100:24c:500g = 32 GPUs on 4 nodes");
        check("1x8:62.5g", "1x8:62.5g = 8 GPUs on 1 nodes");
        check("1x1:mystery", "1x1:mystery = 1 GPUs on 1 nodes");
        check("1x8:a100/80g", "1x8:a100/80g = 8 GPUs on 1 nodes");
        check("1x8:a100/40g", "1x8:a100 = 8 GPUs on 1 nodes");
        check("1x8:a100/0g", "1x8:a100/0g = 8 GPUs on 1 nodes");
        check("1x1:h200/143771m=1:16c", "1x1:h200/143771m=1:16c = 1 GPUs on 1 nodes");
        check("1x1:gpu/24g", "1x1:gpu/24g = 1 GPUs on 1 nodes");
    }

    #[test]
    fn mistakes_are_named() {
        check("", r#"could not read cluster "": expected NODESxGPUS such as 8x8, found """#);
        check(
            "8*8",
            r#"could not read cluster "8*8": expected NODESxGPUS such as 8x8, found "8*8""#,
        );
        check(
            "0x8",
            r#"could not read cluster "0x8": expected NODESxGPUS such as 8x8, found "0x8""#,
        );
        check(
            "1x1:a=-1",
            r#"could not read cluster "1x1:a=-1": expected a speed of 0.001 to 1000, found "-1""#,
        );
        check(
            "1x1:a:b",
            r#"could not read cluster "1x1:a:b": a node has one GPU model, found also "b""#,
        );
        check(
            "1x1:a/big",
            r#"could not read cluster "1x1:a/big": expected the memory of a GPU such as 80g, found "big""#,
        );
        check(
            "1x1:a100/80g,1x1:a100",
            r#"could not read cluster "1x1:a100/80g,1x1:a100": GPU model "a100" has two different sizes of memory"#,
        );
        check("1x1:0g", r#"could not read cluster "1x1:0g": expected 1g to 100000g, found "0g""#);
        check("1x1:0c", r#"could not read cluster "1x1:0c": expected 1c to 100000c, found "0c""#);
        check(
            "1x1:a=1,1x1:a=2",
            r#"could not read cluster "1x1:a=1,1x1:a=2": GPU model "a" has two different speeds"#,
        );
        check(
            "4000000x8",
            r#"could not read cluster "4000000x8": 32000000 GPUs are more than the limit of 1000000"#,
        );
    }
}
