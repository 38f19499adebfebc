//! `egmem topo`: the node as text, JSON or SVG.

use std::path::{Path, PathBuf};

use clap::Args;
use egmem::doctor::Reason;
use egmem::{Error, Result, Topology};

use crate::output::{complain, show};
use crate::source::Source;

/// `egmem topo`
#[derive(Args, Debug)]
pub struct Topo {
    #[command(flatten)]
    source: Source,
    /// Draw the machine of an hwloc XML file, as `lstopo FILE.xml` writes it
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    xml: Option<PathBuf>,
    /// Draw as SVG to this file; - is standard output
    #[arg(long, value_name = "FILE|-", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// Print the topology as JSON
    #[arg(long)]
    json: bool,
}

impl Topo {
    /// Draws the node.
    pub fn run(&self) -> Result<()> {
        let topology = self.topology()?;
        let svg = self.svg.as_deref();
        let [text, drawing] = [Topology::to_text, Topology::to_svg];
        show(&topology, self.json, svg, text, drawing)
    }

    fn topology(&self) -> Result<Topology> {
        if let Some(path) = &self.xml {
            return read_xml(path);
        }
        match self.source.find()? {
            Ok(driver) => Topology::discover(&driver),
            Err(error @ (Error::NoDriver { .. } | Error::Driver(_))) => {
                let reason = Reason::from(error);
                complain(&format!(
                    "warning: {}; what to do: {}\nOnly the host's nodes are shown.\n",
                    reason.message, reason.remedy
                ));
                Ok(Topology::of_host())
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(feature = "hwloc")]
fn read_xml(path: &Path) -> Result<Topology> {
    let xml = std::fs::read_to_string(path)
        .map_err(|error| Error::system(format!("cannot read {}", path.display()), &error))?;
    Topology::from_xml(&xml)
}

#[cfg(not(feature = "hwloc"))]
fn read_xml(_path: &Path) -> Result<Topology> {
    let what = "hwloc XML files, because this program was built without hwloc";
    Err(Error::unsupported(what, None))
}
