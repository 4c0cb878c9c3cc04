"""Schemas of the shipped token mixers (paper Table 1, parameterised as flash-linear-attention does). No torch here."""

from lt2.mixer_configs.delta import DeltaConfig as DeltaConfig
from lt2.mixer_configs.delta import DeltaNetConfig as DeltaNetConfig
from lt2.mixer_configs.delta import GatedDeltaNetConfig as GatedDeltaNetConfig
from lt2.mixer_configs.delta import KimiDeltaConfig as KimiDeltaConfig
from lt2.mixer_configs.linear import GatedLinearConfig as GatedLinearConfig
from lt2.mixer_configs.linear import HGRN2Config as HGRN2Config
from lt2.mixer_configs.linear import LinearAttentionConfig as LinearAttentionConfig
from lt2.mixer_configs.linear import Mamba2Config as Mamba2Config
from lt2.mixer_configs.linear import RetNetConfig as RetNetConfig
from lt2.mixer_configs.softmax import FullConfig as FullConfig
from lt2.mixer_configs.softmax import SoftmaxConfig as SoftmaxConfig
from lt2.mixer_configs.softmax import WindowConfig as WindowConfig
from lt2.mixer_configs.sparse import DSAConfig as DSAConfig
from lt2.mixer_configs.sparse import MLAConfig as MLAConfig
from lt2.mixer_configs.sparse import NSAConfig as NSAConfig
